"""Sampling as a config asks for it: for the grids of a run, and for `flame-train sample`."""

from __future__ import annotations

from collections.abc import Callable

from flame_train.config.schema import LossSection, ModelSection, SampleSection
from flame_train.data.buckets import Placement, Size
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import deterministic
from flame_train.errors import ConfigError
from flame_train.training.model import Denoiser, Example, LoadedVae, Model
from flame_train.training.preview import Drawing, Pixels, draw, grid
from flame_train.training.stop import StopRequest


def with_defaults(sample: SampleSection, model: Model) -> SampleSection:
    """The section with the model's own steps and guidance where it names none."""
    usual = model.sampling_defaults
    filled = {
        "steps": sample.steps or usual.steps,
        "guidance_scale": sample.guidance_scale or usual.guidance_scale,
    }
    return sample.model_copy(update=filled)


def image_size(sample: SampleSection, resolution: int, model: Model) -> Size:
    """(height, width) of a sampled image; the default is `resolution`, rounded down to a side that the model takes."""
    side = max(resolution // model.side_multiple, 1) * model.side_multiple
    return sample.height or side, sample.width or side


def check_sampling(sample: SampleSection, size: Size, base: ModelSection, loss: LossSection, model: Model) -> None:
    """Checks that images can be sampled as a config says.

    Args:
        sample: how images are sampled.
        size: (height, width) of an image, in pixels.
        base: the `[model]` section.
        loss: the `[loss]` section.
        model: the opened model.

    Raises:
        ConfigError: a setting allows no image, or has no effect on it.
    """
    grid = model.side_multiple
    wrong = [
        f"sample.{name}: expected a multiple of {grid} for this model, got {side}"
        for name, side in (("width", sample.width), ("height", sample.height))
        if side % grid
    ]
    wrong += [
        f"sample.{name}: expected at most {model.longest_side}, the longest side with positions here, got {side}"
        for name, side in zip(("height", "width"), size, strict=True)
        if 0 < model.longest_side < side
    ]
    if sample.negative and model.classifier_free_guidance(sample.guidance_scale) == 1.0:
        wrong.append(
            f"sample.negative: expected none, got {sample.negative!r}: with a guidance of {sample.guidance_scale} this "
            "model is run without classifier-free guidance, and never sees it; remove it"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))
    model.sampler(base, loss, sample.steps, sample.sampler, size)


def uncropped(model: Model, size: Size) -> Example:
    """The size conditioning of a sampled image: neither scaled nor cropped."""
    return model.size_conditioning(Placement(size, size, size, 0, 0))


def drawing(
    sample: SampleSection, size: Size, base: ModelSection, loss: LossSection, model: Model, *, device: str, dtype: str
) -> Drawing:
    """The settings of the sampler.

    Args:
        sample, size, base, loss, model: as in `check_sampling`.
        device: "cuda", "cuda:1" and so on, or "cpu".
        dtype: dtype of the denoiser.

    Returns:
        Everything that sampling needs but the prompts.
    """
    return Drawing(
        model.sampler(base, loss, sample.steps, sample.sampler, size),
        model.classifier_free_guidance(sample.guidance_scale),
        sample.seed,
        model.vae.latent_shape(size),
        device,
        as_dtype(dtype),
    )


def grid_of(
    sample: SampleSection,
    how: Drawing,
    size: Size,
    captions: Callable[[str], Example],
    denoiser: Denoiser,
    vae: Callable[[], LoadedVae],
    stop: StopRequest,
) -> Callable[[], Pixels] | None:
    """A function that samples the grid with the network's weights at the time of the call.

    Args:
        sample: the section, defaults filled in.
        how: the settings of the sampler, as `drawing` returns them.
        size: (height, width) of an image, in pixels.
        captions: the arrays of a prompt.
        denoiser: the network with the guidance of sampling.
        vae: loads the decoder.
        stop: raises Interrupted after a signal; checked between steps.

    Returns:
        The function; None if the config wants no grids.
    """
    if not sample.prompts or not sample.repeats:
        return None
    sizes = uncropped(denoiser.model, size)
    prompts = [captions(prompt) | sizes for prompt in sample.prompts]
    negative = captions(sample.negative) | sizes
    decoder = vae()

    def drawn() -> Pixels:
        # Choices are measured for what recurs thousands of times, and what training may vary in must not show here.
        with deterministic(True):
            return grid(draw(how, denoiser.denoise, decoder.decode, prompts, negative, stop))

    return drawn
