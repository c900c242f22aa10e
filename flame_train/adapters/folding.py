"""Moving alpha into the up matrix, for files that diffusers reads, and out again.

diffusers' naming has no alpha at all, so alpha / rank is folded. In kohya's naming `shared_alpha` folds the ratio of a
layer's alpha to that of the file.

Folding is exact when the scaled values fit the matrix's dtype (a ratio that is a power of two, short of
underflow). Otherwise the folded matrix is stored in fp32. Then 16-bit matrices are restored exactly, and fp32 ones to
within one unit in the last place. Folding them again gives the same file. More is impossible: two neighbours may have
one rounded product, and only a folded scale has the same effect in every program. The alphas that were folded are
kept in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from flame_train.adapters.factors import Array, LoraFactors, LoraState
from flame_train.errors import NonFiniteError

ALPHA_KEY: Final = "flame_train.folded_alpha"


def fold(factors: LoraFactors, written: float | None = None) -> Array:
    """`up` times alpha / `written`, the alpha in the file or the rank: in its own dtype when exact, else in fp32.

    Rounds once. Raises NonFiniteError for a product that fp32 cannot hold.
    """
    ratio = factors.alpha / written if written else factors.scale
    if ratio == 1.0:
        return factors.up
    exact = factors.up.astype(np.float64) * ratio
    with np.errstate(over="ignore"):  # too large for 16 bits is seen below
        own = exact.astype(factors.up.dtype)
    if np.array_equal(own.astype(np.float64), exact):
        return own
    if not (np.abs(exact) <= np.finfo(np.float32).max).all():
        raise NonFiniteError(f"alpha / rank of {factors.scale:g} takes a LoRA's values beyond what a file can hold")
    return own if factors.up.dtype.itemsize >= 4 else exact.astype(np.float32)


def unfold(down: Array, folded: Array, alpha: float, written: float | None = None) -> LoraFactors:
    """Returns the factors of this `alpha` whose `fold` to `written`, the alpha in the file or the rank, is `folded`."""
    written = float(down.shape[0]) if written is None else written
    ratio = alpha / written if written else 0.0
    if ratio == 1.0 or ratio == 0.0:
        return LoraFactors(down, folded, written)
    quotient = folded.astype(np.float64) / ratio
    for dtype in dict.fromkeys((down.dtype, folded.dtype)):
        with np.errstate(over="ignore"):  # then it does not fold back
            restored = _nearest_that_folds_back(quotient.astype(dtype), folded, ratio)
        factors = LoraFactors(down, restored, alpha)
        again = fold(factors, written)
        if again.dtype == folded.dtype and np.array_equal(again, folded):
            return factors
    return LoraFactors(down, folded, written)  # never written by `fold`: same effect, other alpha


def _nearest_that_folds_back(restored: Array, folded: Array, ratio: float) -> Array:
    """Steps to the neighbour where fp32 division missed by one unit in the last place."""
    if restored.dtype != np.float32 or folded.dtype != np.float32:
        return restored
    for toward in (np.float32(np.inf), np.float32(-np.inf)):
        neighbour = np.nextafter(restored, toward)
        wrong = (restored.astype(np.float64) * ratio).astype(np.float32) != folded
        right = (neighbour.astype(np.float64) * ratio).astype(np.float32) == folded
        restored = np.where(wrong & right, neighbour, restored)
    return restored


def alpha_record(state: LoraState) -> dict[str, str]:
    """Returns metadata from which `recorded_alphas` restores each module's alpha.

    One number per component when all its modules share it, else one per module in the order of their names.
    """
    record: dict[str, Any] = {}
    for component, modules in sorted(state.items()):
        alphas = [modules[module].alpha for module in sorted(modules)]
        record[component] = alphas[0] if len(set(alphas)) == 1 else alphas
    return {ALPHA_KEY: json.dumps(record, separators=(",", ":"))}


def recorded_alphas(metadata: Mapping[str, str], modules: Mapping[str, list[str]]) -> dict[tuple[str, str], float]:
    """Returns (component, module) -> alpha folded into the file; empty without a usable record.

    A record that does not fit the modules (tensors were added or removed since) is ignored. Without it the file has
    the same meaning, with alpha equal to rank.
    """
    try:
        record = json.loads(metadata.get(ALPHA_KEY, "{}"))
        alphas: dict[tuple[str, str], float] = {}
        for component, names in modules.items():
            value = record[component]
            values = value if isinstance(value, list) else [value] * len(names)
            for name, alpha in zip(sorted(names), values, strict=True):
                alphas[component, name] = float(alpha)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return {}
    return alphas if all(np.isfinite(alpha) and alpha > 0 for alpha in alphas.values()) else {}
