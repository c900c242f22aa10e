"""Debiased estimation (arXiv 2310.08442), as sd-scripts' `apply_debiased_estimation`."""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.diffusion.weightings import Weighting

_MOST = 1000.0  # a signal-to-noise ratio above it counts as this


class Debiased(Weighting):
    """1 / sqrt(snr) for models that predict noise, 1 / (snr + 1) for v. OneTrainer's for v is the root of that."""

    name = "debiased"

    def of_snr(self, snr: Any, prediction: str) -> Any:
        limited = np.minimum(snr, _MOST)
        return 1.0 / (np.sqrt(limited) if prediction == "epsilon" else limited + 1.0)
