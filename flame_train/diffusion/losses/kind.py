"""What a loss is to an objective: the distance between prediction and target."""

from __future__ import annotations

from flame_train.engine import Tensor
from flame_train.settings import Entry


class LossKind(Entry):
    """One distance between prediction and target: its fields are keys of `[loss]`."""

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Each element's error, fp32 (B, H, W, C), for fp32 tensors of this shape."""
        raise NotImplementedError
