"""LoCon: LoRA on convolutions too, whose kernels larger than 1x1 have a rank and an alpha of their own (LyCORIS)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flame_train.settings import field

from .lora import Lora


class Locon(Lora):
    """As sd-scripts' `conv_dim` and `conv_alpha` have it: a 1x1 convolution counts as a linear layer."""

    name = "locon"

    conv_rank: int = field(8, "inner width on convolutions larger than 1x1", ge=1, le=4096, aka=("conv_dim", "conv"))
    conv_alpha: float = field(8.0, "there the update is scaled by conv_alpha / conv_rank", gt=0, le=1_000_000)

    def shape_problem(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
        if any(_has_kernel(shape) for shape in shapes.values()):
            return None
        return "kind", (
            'expected lora.targets that name convolutions with "locon", got none larger than 1x1; add such targets, '
            'as "full" of SDXL has them, or set lora.kind = "lora"'
        )

    def sizes(self, weight_shape: tuple[int, ...], rank: int, alpha: float) -> tuple[int, float]:
        return (self.conv_rank, self.conv_alpha) if _has_kernel(weight_shape) else (rank, alpha)


def _has_kernel(weight_shape: tuple[int, ...]) -> bool:
    return math.prod(weight_shape[2:]) > 1
