"""`flame-train sample`: images from a base model, with or without a LoRA."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flame_train.adapters.attach import attach_factors
from flame_train.adapters.factors import LoraState
from flame_train.adapters.formats import from_file
from flame_train.config.load import from_options, told_by_option
from flame_train.disk.files import refuse_place
from flame_train.engine import nn, no_grad
from flame_train.engine.backend import check_formats
from flame_train.errors import ConfigError, ModelFileError, out_of_memory
from flame_train.io.hub import fetching, resolve_checkpoint
from flame_train.models.common.identify import could_be
from flame_train.recipes import Opening, family_of
from flame_train.run.check import fp8_of
from flame_train.run.encoding import CaptionEncoders, Encoding
from flame_train.run.sampling import check_sampling, drawing, image_size, uncropped, with_defaults
from flame_train.text_encoders import too_long
from flame_train.tools.families import refuse_non_finite, require_lora
from flame_train.training.model import Example, Model
from flame_train.training.preview import draw, grid, write_png
from flame_train.training.stop import StopRequest

_LOG = logging.getLogger(__name__)


@out_of_memory("try one --prompt at a time, a smaller --width and --height, or --quantize fp8")
@fetching()
def sample(
    checkpoint: str,
    prompts: Sequence[str],
    output: Path,
    *,
    lora: Path | None,
    strength: float,
    negative: str,
    steps: int,
    guidance_scale: float,
    sampler: Any,
    prediction: Any,
    precision: Any,
    seed: int,
    width: int,
    height: int,
    device: str,
    force: bool = False,
    quantize: str = "off",
    arithmetic: str = "bf16",
    vae: str = "",
    text_encoders: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Samples an image for each prompt and writes them as one PNG.

    Image i starts from noise number seed + i. So an image with a LoRA can be compared with one without it.

    Args:
        checkpoint: the base model's file, folder or hub id.
        prompts: the prompts, in order.
        output: the PNG.
        lora: the LoRA's file, in any naming, for the text encoders too; None: the base model only.
        strength: factor of the LoRA's update.
        negative: the negative prompt.
        steps, guidance_scale: of the sampler; 0: the model's own.
        sampler: the name of the sampler.
        prediction: "epsilon" or "v".
        precision: dtype of the networks.
        seed: seed of the first image.
        width, height: size of an image, in pixels.
        device: "cuda" or "cpu".
        force: whether an existing PNG is overwritten.
        quantize, arithmetic: as `model.quantize` and `model.arithmetic` in a config.
        vae: another autoencoder's file; "": the checkpoint's own.
        text_encoders: keys of that section of a config.

    Returns:
        The prompts, the settings and the path of the PNG.

    Raises:
        ConfigError: impossible sizes, or settings that do not fit the model.
        ModelFileError: a model of an unknown family, or a LoRA of another one.
        NonFiniteError: the result holds NaN or infinity.
        OutputError: the PNG exists and `force` is false.
    """
    refuse_place(output, ".png", force)
    if not math.isfinite(strength):
        raise ConfigError(f"strength must be a finite number, got {strength}")
    config = from_options(
        model={
            "checkpoint": checkpoint,
            "prediction": prediction,
            "quantize": quantize,
            "arithmetic": arithmetic,
            "vae": vae,
        },
        text_encoders=dict(text_encoders or {}),
        train={"precision": precision},
        sample={
            "prompts": tuple(prompts),
            "negative": negative,
            "steps": steps,
            "guidance_scale": guidance_scale,
            "sampler": sampler,
            "seed": seed,
            "width": width,
            "height": height,
        },
    )
    # a missing GPU, or one without the number format, is an error before any file is read
    check_formats(device, {"--precision": precision, "--text-precision": config.text_encoders.precision})
    fp8 = fp8_of(quantize, arithmetic)
    nn.check_fp8(fp8, device, precision)
    if not prompts:
        raise ConfigError("sample: expected at least one --prompt, got none")
    base = resolve_checkpoint(checkpoint)
    family = family_of(base)
    with told_by_option():
        family.refuse_unsupported(config)
        model = family.open(Opening(base, config.model, config.text_encoders, config.data.max_tokens))
        how = with_defaults(config.sample, model)
        size = image_size(how, config.data.resolution, model)
        check_sampling(how, size, config.model, config.loss, model)
    factors = _factors(lora, model) if lora is not None else {}
    text = Encoding(
        model.vae, model.text, config.model.vae_precision, precision, config.text_encoders.precision, Path()
    )
    with StopRequest() as stop:
        texts = [*how.prompts, how.negative]
        examples = _conditioning(text, texts, uncropped(model, size), device, factors, strength, stop)
        denoiser = model.load_denoiser(device=device, dtype=precision, fp8=fp8, guidance_scale=how.guidance_scale)
        if denoiser.component in factors:
            attach_factors(denoiser.network, factors[denoiser.component], strength)
        wanted = [examples[prompt] for prompt in prompts]
        spec = drawing(how, size, config.model, config.loss, model, device=device, dtype=precision)
        decoder = model.vae.load(config.model.vae_precision, device)
        images = draw(spec, denoiser.denoise, decoder.decode, wanted, examples[negative], stop)
    write_png(output, grid(images))
    return {
        "image": str(output),
        "prompts": list(prompts),
        "checkpoint": checkpoint,
        "lora": str(lora) if lora else None,
        "strength": strength if lora else None,
        "width": width,
        "height": height,
        "steps": how.steps,
        "guidance_scale": how.guidance_scale,
        "seed": seed,
        "precision": precision,
        "quantize": quantize,
        "arithmetic": arithmetic,
    }


def _factors(lora: Path, model: Model) -> LoraState:
    """The LoRA's matrices by component. Raises ModelFileError for a file that is no LoRA of this family."""
    identity = require_lora(lora)
    if not could_be(identity.family, model.name):
        raise ModelFileError(f"{lora}: expected a LoRA for {model.title}, but this is: {identity.detail}")
    state = from_file(lora, model.lora_names).state
    refuse_non_finite(lora, state)
    return state


def _conditioning(
    encoding: Encoding,
    texts: Sequence[str],
    sizes: Example,
    device: str,
    factors: LoraState,
    strength: float,
    stop: StopRequest,
) -> dict[str, Example]:
    """Encodes every prompt and the negative one; unloads the text encoders afterwards.

    Args:
        encoding: the text encoders.
        texts: the prompts, and last the negative one.
        sizes: the arrays that describe the image's size.
        device: "cuda" or "cpu".
        factors: the LoRA by component.
        strength: factor of the LoRA's update.
        stop: raises Interrupted after a signal.

    Returns:
        The denoiser's arrays of each text.
    """
    with no_grad():
        encoders = encoding.encoders(device)
        _adapt(encoders, factors, strength)
        stop.check("while reading the prompts")
        wanted = list(dict.fromkeys(texts))
        examples = {text: made | sizes for text, made in zip(wanted, encoders.captions(wanted), strict=True)}
    *prompts, _ = texts
    cut, longest = too_long(encoding.text, prompts)
    if cut and longest is not None:
        _LOG.warning("%d prompt(s) are longer than %d tokens; the rest is not seen", cut, longest.limit[1])
    return examples


def _adapt(encoders: CaptionEncoders, factors: LoraState, strength: float) -> None:
    for component, network in encoders.networks.items():
        if component in factors:
            attach_factors(network, factors[component], strength)
