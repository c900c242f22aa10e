"""min-SNR weighting (arXiv 2303.09556)."""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.diffusion.weightings import Weighting
from flame_train.settings import field


class MinSnr(Weighting):
    """min(snr, gamma) / snr for models that predict noise, min(snr, gamma) / (snr + 1) for v."""

    name = "min_snr"

    snr_gamma: float = field(
        5.0, "the signal-to-noise ratio above which a sample counts less", gt=0, aka=("min_snr_gamma",)
    )

    def of_snr(self, snr: Any, prediction: str) -> Any:
        return np.minimum(snr, self.snr_gamma) / (snr if prediction == "epsilon" else snr + 1.0)
