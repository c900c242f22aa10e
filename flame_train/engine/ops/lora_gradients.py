"""The gradients of LoRA's factors: thin products of activations, summed and returned in fp32 whatever their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dtype import Array, compute_dtype, float32
from ..graph import Held
from . import thin_products
from .thin_products import Thin


def side_by_side(k: Any, arrays: Sequence[Array]) -> Array:
    """n arrays (..., C) as (rows, n, C): no copy where they are slices of one buffer."""
    flat = k.stacked([a.reshape(-1, a.shape[-1]) for a in arrays])
    return flat.transpose(1, 0, 2)


Wanted = Mapping[str, Sequence[Held] | None]
"""The gradients wanted, "down" or "up", each with what they may be added to."""


def listed(held: Held | None) -> list[Held] | None:
    return None if held is None else [held]


def factor_gradients(k: Any, t: Thin, wanted: Wanted) -> dict[str, list[Array]]:
    """The factors' gradients in fp32 or fp64, a list for each name; held ones are added, in place where possible."""
    blocks = {n: _block(k, held) if held else None for n, held in wanted.items()}
    apart = [n for n, held in wanted.items() if held and getattr(blocks[n], "dtype", None) != float32]
    if len(wanted) == 2 and not apart and thin_products.fit(k, t):
        final = all(held and all(h.final for h in held) for held in wanted.values())
        made = thin_products.both(k, t, blocks, final)
        return {n: [h.array for h in held] if held else made[n] for n, held in wanted.items()}
    n, rank = t.rows.shape[1], t.rank
    products = {
        "down": (t.inner.T, t.x),
        "up": (t.rows.transpose(1, 2, 0), t.low.reshape(-1, n, rank).transpose(1, 0, 2)),
    }
    return {name: _stacked_sums(k, held, *products[name], t.shape(name)) for name, held in wanted.items()}


def _block(k: Any, held: Sequence[Held]) -> Any:
    """The held gradients as one dense array that may be written over; None if they do not lie so."""
    block = k.adjacent([h.array for h in held]) if all(h.owned for h in held) else None
    return block if block is not None and block.flags.c_contiguous else None


def _stacked_sums(
    k: Any, held: Sequence[Held] | None, a: Array, b: Array, shape: tuple[int, int, int]
) -> list[Array]:  # fmt: skip
    """a @ b as n gradients in fp32 or fp64, added to the held ones, in place where these lie as one block."""
    block = _block(k, held) if held else None
    if block is not None:
        target = block.reshape(*a.shape[:-1], b.shape[-1])
        k.matmul(a, b, out=target, plus=target)
        return [h.array for h in held or ()]
    made = k.matmul(a, b, out_dtype=compute_dtype(a.dtype)).reshape(shape)
    return [g + h.array for g, h in zip(made, held, strict=True)] if held else list(made)
