"""Weightings of the noise level s of a flow, as diffusers' `compute_loss_weighting_for_sd3` has them.

Its s has a thousand steps, so no weight there is above a million. The bound here keeps that.
"""

from __future__ import annotations

import math

import numpy as np

from flame_train.diffusion.weightings import Weighting
from flame_train.engine.dtype import Array

_LEAST_SIGMA = np.float32(1e-3)  # a single sample of s = 1e-6 would outweigh all others of a run


class SigmaSqrt(Weighting):
    """s^-2."""

    name = "sigma_sqrt"

    def of_flow(self, sigma: Array) -> Array:
        weights: Array = sigma.clip(_LEAST_SIGMA) ** -2.0
        return weights


class Cosmap(Weighting):
    """2 / (pi (1 - 2 s + 2 s^2)) (arXiv 2403.03206, section 3.1)."""

    name = "cosmap"

    def of_flow(self, sigma: Array) -> Array:
        weights: Array = 2.0 / (np.float32(math.pi) * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
        return weights
