"""No weighting: every sample counts alike."""

from __future__ import annotations

from .kind import Weighting


class NoWeighting(Weighting):
    name = "none"
