"""soft min-SNR weighting (arXiv 2401.11605, section 3.3)."""

from __future__ import annotations

from typing import Any

from flame_train.diffusion.weightings import Weighting
from flame_train.settings import field


class SoftMinSnr(Weighting):
    """min(snr, gamma) of min-SNR made smooth: snr gamma / (snr + gamma).

    The paper's weight of the error of x_0, 1 / (sigma^2 + 1 / gamma), with its gamma of 4, in terms of noise or v.
    """

    name = "soft_min_snr"

    snr_gamma: float = field(
        4.0, "the signal-to-noise ratio above which a sample counts less", gt=0, aka=("soft_min_snr_gamma",)
    )

    def of_snr(self, snr: Any, prediction: str) -> Any:
        if prediction == "epsilon":
            return self.snr_gamma / (snr + self.snr_gamma)
        return snr * self.snr_gamma / ((snr + self.snr_gamma) * (snr + 1.0))
