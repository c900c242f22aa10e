"""P2 weighting (arXiv 2204.00227), as OneTrainer has it."""

from __future__ import annotations

from typing import Any

from flame_train.diffusion.weightings import Weighting
from flame_train.settings import field


class P2(Weighting):
    """1 / (1 + snr)^gamma for models that predict noise, 1 / (2 + snr)^gamma for v."""

    name = "p2"

    p2_gamma: float = field(1.0, "exponent: how much less a sample with little noise counts", gt=0, le=10)

    def of_snr(self, snr: Any, prediction: str) -> Any:
        return (snr + (1.0 if prediction == "epsilon" else 2.0)) ** -self.p2_gamma
