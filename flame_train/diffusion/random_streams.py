"""The random streams of a training step: numbers of different streams are independent."""

from __future__ import annotations

from enum import IntEnum


class Stream(IntEnum):
    """The random streams of an objective; see `engine.random.Rng`."""

    NOISE = 16
    TIMESTEPS = 17
    OFFSET = 18
    OFFSET_STRENGTH = 19
    PYRAMID = 20
    PYRAMID_SCALE = 21
    PERTURBATION = 22
    PERTURBATION_STRENGTH = 23
    SIGN = 24
    CONTRAST = 25
