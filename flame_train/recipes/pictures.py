"""Drawing with a family's networks as a config says: for sample grids while training and for `flame-train sample`."""

from __future__ import annotations

from flame_train.config.schema import Config
from flame_train.data.buckets import Placement, Size
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError
from flame_train.training.family import Example, Facts, Family
from flame_train.training.preview import Drawing


def as_usual(config: Config, family: Family) -> Config:
    """The config with the model's own steps and guidance where it names none."""
    s, usual = config.sample, family.usual(config)
    filled = {"steps": s.steps or usual.steps, "guidance": s.guidance or usual.guidance}
    return config.model_copy(update={"sample": s.model_copy(update=filled)})


def check_sampling(config: Config, family: Family, facts: Facts) -> None:
    """Raises ConfigError for what no picture can be drawn with, or what would not be seen in it; said early."""
    s, grid = config.sample, facts.side_multiple
    wrong = [
        f"sample.{name}: expected a multiple of {grid} for this model, got {side}"
        for name, side in (("width", s.width), ("height", s.height))
        if side % grid
    ]
    wrong += [
        f"sample.{name}: expected at most {facts.longest_side}, the longest side with positions here, got {side}"
        for name, side in zip(("height", "width"), picture_size(config, facts), strict=True)
        if 0 < facts.longest_side < side
    ]
    if s.negative and family.guidance(config) == 1.0:
        wrong.append(
            f"sample.negative: expected none, got {s.negative!r}: with a guidance of {s.guidance} this model is "
            "run without classifier-free guidance, and never sees it; remove it"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))
    family.sampler(config, picture_size(config, facts))


def picture_size(config: Config, facts: Facts) -> Size:
    """(height, width) of a sample picture; what is not set is data.resolution, rounded down to what the model takes."""
    usual = max(config.data.resolution // facts.side_multiple, 1) * facts.side_multiple
    return config.sample.height or usual, config.sample.width or usual


def size_conditioning(family: Family, size: Size) -> Example:
    """What the denoiser is told of the size of a sampled picture: whole, neither scaled nor cropped."""
    return family.placement(Placement(size, size, size, 0, 0))


def drawing(config: Config, family: Family, size: Size, device: str) -> Drawing:
    """How `config.sample` wants pictures of `size` drawn."""
    s = config.sample
    latent, dtype = family.latent_shape(config, size), as_dtype(config.train.precision)
    return Drawing(family.sampler(config, size), family.guidance(config), s.seed, latent, device, dtype)
