"""What keeps activations within fp16, where a model's go beyond it."""

from __future__ import annotations

from typing import Final

from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import float16

MOST: Final = 65504.0
"""fp16's largest number."""


def bounded(x: Tensor) -> Tensor:
    """Values of fp16 clamped to its largest number, where infinities would be; others as they are."""
    return F.clamp(x, -MOST, MOST) if x.dtype == float16 else x
