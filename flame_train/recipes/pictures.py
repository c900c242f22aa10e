"""Drawing with a family's networks as a config says: for sample grids while training and for `flame-train sample`."""

from __future__ import annotations

from flame_train.config.schema import Config
from flame_train.data.buckets import Placement, Size
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError
from flame_train.training.family import Example, Facts, Family
from flame_train.training.preview import Drawing


def check_sampling(config: Config, family: Family, facts: Facts) -> None:
    """Raises ConfigError for sizes or steps with which no picture can be drawn; said early, not at each grid."""
    s, grid = config.sample, facts.side_multiple
    wrong = [
        f"sample.{name}: expected a multiple of {grid} for this model, got {side}"
        for name, side in (("width", s.width), ("height", s.height))
        if side % grid
    ]
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
