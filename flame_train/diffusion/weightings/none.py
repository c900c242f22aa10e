"""No weighting: every sample counts alike."""

from __future__ import annotations

from flame_train.diffusion.weightings import Weighting


class NoWeighting(Weighting):
    name = "none"
