"""Drawing with a family's networks as a config says: for sample grids while training and for `flame-train sample`."""

from __future__ import annotations

from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine.dtype import as_dtype
from flame_train.training.family import Example, Family
from flame_train.training.preview import Drawing


def noise_schedule(config: Config) -> NoiseSchedule:
    """The model's noise schedule, with zero terminal SNR if asked for."""
    schedule = NoiseSchedule.scaled_linear()
    return schedule.zero_terminal_snr() if config.loss.zero_terminal_snr else schedule


def picture_size(config: Config) -> tuple[int, int]:
    """(height, width) of sampled pictures in pixels."""
    s = config.sample
    return s.height or config.data.resolution, s.width or config.data.resolution


def size_conditioning(config: Config, family: Family) -> Example:
    """What the denoiser is told of the size of a sampled picture: whole, neither scaled nor cropped."""
    size = picture_size(config)
    return family.placement(Placement(size, size, size, 0, 0))


def drawing(config: Config, family: Family, device: str) -> Drawing:
    """How `config.sample` wants pictures drawn."""
    s = config.sample
    return Drawing(
        s.sampler, s.steps, s.guidance, s.seed, noise_schedule(config), config.model.prediction,
        family.latent_shape(config, picture_size(config)), device, as_dtype(config.train.precision),
    )  # fmt: skip
