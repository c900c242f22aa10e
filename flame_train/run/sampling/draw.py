"""Draws images: the same prompt from the same noise each time, so that two images differ by the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Placement, Size
from flame_train.data.grid import Pixels
from flame_train.data.padding import Paddings, collate
from flame_train.data.views import ViewedImage
from flame_train.diffusion.samplers import SAMPLERS, Path, Sampler, guided
from flame_train.disk.failpoint import fail_point
from flame_train.engine import Tensor, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, as_dtype, is_float
from flame_train.engine.random import Rng
from flame_train.errors import NonFiniteError
from flame_train.models.common.control import by_name
from flame_train.models.common.model import Denoiser, Example, Model
from flame_train.networks.vae.autoencoder import Autoencoder, LoadedVae
from flame_train.progress import progress
from flame_train.run.sampling.requests import Request
from flame_train.training.session import StopRequest

SAMPLE_NOISE = 33  # a stream of random numbers; see `engine/random.py`


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """The settings of an image's sampling: everything but the arrays of the prompts.

    `kept` is `Model.guidance_keeps`.
    """

    sampler: Sampler
    path: Path
    guidance: float
    seed: int
    latent: tuple[int, ...]
    device: str
    dtype: DType
    paddings: Paddings
    kept: int = 0


def uncropped(model: Model, size: Size) -> Example:
    """Returns the size conditioning of a sampled image: neither scaled nor cropped."""
    return model.size_conditioning(Placement(size, size, size, 0, 0))


def sampler_spec(
    request: Request, base: ModelSection, loss: LossSection, model: Model, *, device: str, dtype: str
) -> SamplerSpec:
    """Returns the settings of the sampler for an image.

    Args:
        base, loss, model: as in `check_sampling`.
    """
    return SamplerSpec(
        SAMPLERS[request.sampler](),
        model.path(base, loss, request.steps, request.size, request.spacing, request.frames),
        model.classifier_free_guidance(request.guidance_scale),
        request.seed,
        model.vae.latent_shape(request.size, request.frames),
        device,
        as_dtype(dtype),
        model.paddings,
        model.guidance_keeps,
    )


def generate_image(
    request: Request,
    how: SamplerSpec,
    captions: Callable[[str], Example],
    denoiser: Denoiser,
    vae: LoadedVae,
    stop: StopRequest,
    controls: Example | None = None,
) -> Pixels:
    """Returns one sampled image, uint8 (H, W, 3), or a clip (F, H, W, 3).

    Args:
        how: the settings of the sampler.
        captions: the arrays of a prompt.
        denoiser: the loaded network, and the text encoders that run.
        controls: the arrays of its control images.
    """
    others = uncropped(denoiser.model, request.size) | (controls or {})
    positive, negative = (captions(text) | others for text in (request.text, request.negative))
    guided = denoiser.guided(request.guidance_scale, how.device)

    def conditioned(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return guided.conditioned(arrays, how.dtype)

    return generate(how, guided.denoise, vae.decode, positive, negative, stop, conditioned)


def generate(
    d: SamplerSpec,
    denoise: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor],
    decode: Callable[[Tensor], Pixels],
    prompt: Example,
    negative: Example,
    stop: StopRequest,
    conditioned: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda arrays: arrays,
) -> Pixels:
    """Returns one sampled image, uint8 (H, W, 3), or a clip (F, H, W, 3).

    Args:
        d: the settings of the sampler.
        denoise: the network: (x, t, conditioning) to its prediction.
        decode: decodes latents into pixels.
        prompt: the arrays of the prompt.
        negative: the arrays of the negative prompt.
        conditioned: makes the conditioning of the arrays of both, once for all steps.

    Raises:
        NonFiniteError: latents hold NaN or infinity.
    """
    backend, calls = get_backend(d.device), d.sampler.calls
    xp, total = backend.xp, calls * (len(d.path.levels) - 1) - (calls - 1)
    with no_grad(), progress("sampling", 0 if backend.described else total, leaves_line=False) as advance:

        def noise(number: int) -> Tensor:
            return Tensor(Rng(xp, d.seed, number, xp.zeros((1,), np.int64)).normal(SAMPLE_NOISE, d.latent))

        def step(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
            fail_point("sample.step")
            stop.check("while sampling")
            return denoise(x.to(d.dtype), t, cond).float()

        model = guided(step, d.guidance, d.kept)

        def predict_and_advance(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
            prediction = model(x, t, cond)
            advance(1)
            return prediction

        cond = conditioned(_conditioning([prompt] if d.guidance == 1.0 else [prompt, negative], d))
        latents = d.sampler.sample(predict_and_advance, noise(0), cond, d.path, lambda i: noise(i + 1))
        if not np.isfinite(latents.numpy()).all():
            raise NonFiniteError(
                "sampling gave NaN or infinity, which is no image; if it does so with every prompt, the model "
                "overflows in this precision: try bf16 or fp32"
            )
        pixels = decode(latents)[0]
        return pixels[0] if pixels.shape[0] == 1 == pixels.ndim - 3 else pixels


def _conditioning(examples: Sequence[Example], d: SamplerSpec) -> dict[str, Tensor]:
    """Returns the examples as a batch on the device, floats in the model's dtype."""
    stacked = collate(examples, d.paddings)
    return {n: tensor(a, d.dtype if is_float(a.dtype) else None, d.device) for n, a in stacked.items()}


def encoded(images: Sequence[ViewedImage], vae_part: Autoencoder, vae: LoadedVae) -> Example:
    """Encodes control images now, where no cache has their arrays."""
    encoder = vae.encoder()
    with no_grad():
        outputs = [encoder.start([vae.inputs(image.pixels())])()[0] for image in images]
    return by_name(vae_part.seen(arrays["mean"]) for arrays in outputs)


def blank(images: Iterable[ViewedImage], vae_part: Autoencoder) -> Example:
    """Makes the arrays of control images, all zeros."""
    return by_name(np.zeros(vae_part.latent_shape(image.view.placement.bucket), np.float32) for image in images)
