"""The sum of several LoRAs as one: their matrices side by side, which is exact, and its rank the sum of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .factors import LoraFactors
from .folding import fold
from .qkv_split import holding


def summed(parts: Sequence[tuple[LoraFactors, float]]) -> LoraFactors:
    """The LoRA whose update is the sum of each one's, times its strength. ValueError where shapes differ.

    Where strength times alpha / rank is the same for all, the matrices stay bit for bit, and alpha takes it up.
    Otherwise it goes into the up matrices: in their own format if that is exact, in fp32 if not.
    """
    shapes = {factors.weight_shape for factors, _ in parts}
    if len({shape[:2] for shape in shapes}) > 1 or len({shape[2:] for shape in shapes}) > 1:
        raise ValueError(f"is of shape {' and '.join(str(shape) for shape in sorted(shapes))}")
    rank = sum(factors.rank for factors, _ in parts)
    scales = {factors.scale * strength for factors, strength in parts}
    if len(scales) == 1:
        alpha, ups = scales.pop() * rank, [factors.up for factors, _ in parts]
    else:
        alpha = float(rank)
        ups = [fold(LoraFactors(factors.down, factors.up, factors.alpha * strength)) for factors, strength in parts]
    of_downs, of_ups = holding([factors.down for factors, _ in parts]), holding(ups)
    return LoraFactors(
        np.concatenate([factors.down.astype(of_downs, copy=False) for factors, _ in parts]),
        np.concatenate([up.astype(of_ups, copy=False) for up in ups], axis=1),
        alpha,
    )
