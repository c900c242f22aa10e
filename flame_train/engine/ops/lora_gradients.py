"""The gradients of LoRA's factors: thin products of activations, summed and returned in fp32 whatever their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..dtype import Array, compute_dtype, float32
from ..graph import Held
from . import conditions


def side_by_side(k: Any, arrays: Sequence[Array]) -> Array:
    """n arrays (..., C) as (rows, n, C): no copy where they are slices of one buffer."""
    flat = k.stacked([a.reshape(-1, a.shape[-1]) for a in arrays])
    return flat.transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class Thin:
    """The operands of the factors' gradients for n layers of one input: `inner`^T x for down, `rows`^T low for up.

    x (M, K) is the input, rows (M, n, N) the outputs' gradients, inner (M, n rank) the gradients of the low-rank
    activations, low (M, n rank) these activations.
    """

    x: Array
    rows: Array
    inner: Array
    low: Array
    rank: int

    def shape(self, name: str) -> tuple[int, int, int]:
        """The shape of the stacked gradients of "down" or "up"."""
        n, out = self.rows.shape[1:]
        return (n, self.rank, self.x.shape[1]) if name == "down" else (n, out, self.rank)


Wanted = Mapping[str, Sequence[Held] | None]
"""The gradients wanted, "down" or "up", each with what they may be added to."""


def listed(held: Held | None) -> list[Held] | None:
    return None if held is None else [held]


def factor_gradients(k: Any, t: Thin, wanted: Wanted) -> dict[str, list[Array]]:
    """The factors' gradients in fp32 or fp64, a list for each name; held ones are added, in place where possible."""
    blocks = {n: _block(k, held) if held else None for n, held in wanted.items()}
    apart = [n for n, held in wanted.items() if held and getattr(blocks[n], "dtype", None) != float32]
    if len(wanted) == 2 and not apart and _at_once(k, t):
        final = all(held and all(h.final for h in held) for held in wanted.values())
        made = _both(k, t, blocks, final)
        return {n: [h.array for h in held] if held else made[n] for n, held in wanted.items()}
    n, rank = t.rows.shape[1], t.rank
    products = {
        "down": (t.inner.T, t.x),
        "up": (t.rows.transpose(1, 2, 0), t.low.reshape(-1, n, rank).transpose(1, 0, 2)),
    }
    return {name: _stacked_sums(k, held, *products[name], t.shape(name)) for name, held in wanted.items()}


_DEPTH, _THREADS = 32, 128  # as in lora.cu
_LEAST_ROWS = 512  # with fewer, cuBLASLt's kernels are as fast
_CUTS = ((128, 4, 4 / 3), (64, 4, 1), (64, 8, 0))
"""A tile's columns, the blocks that share a tile, and the least number of blocks to a multiprocessor it is used for."""


def _at_once(k: Any, t: Thin) -> bool:
    """Whether lora.cu makes both products in one launch: with thin factors, launching costs more than computing."""
    m, (n, out) = len(t.x), t.rows.shape[1:]
    arrays = (t.x, t.rows, t.inner, t.low)
    return (
        k.compute_capability >= 90
        and not conditions.same(conditions.LOW, *arrays)
        and t.rank % 16 == 0
        and n * t.rank <= 64
        and m >= _LEAST_ROWS
        and not (t.x.shape[1] % 8 or out % 8)
        and all(a.strides[-1] == a.itemsize and a.data.ptr % 16 == 0 for a in arrays)
        and all(s % 16 == 0 for a in arrays for s in a.strides[:-1])
    )


def _tiles(t: Thin, columns: int) -> int:
    (n, out), width = t.rows.shape[1:], t.x.shape[1]
    return n * t.rank // 16 * (-(-width // columns) - (-out // columns))


def _both(k: Any, t: Thin, targets: Mapping[str, Any], final: bool) -> dict[str, list[Array]]:
    """Both gradients by lora.cu, added to the targets where there are some; on the side stream if all are `final`."""
    made = {n: k.empty(t.shape(n), float32) if target is None else target for n, target in targets.items()}
    (n, out), (m, width), rank = t.rows.shape[1:], t.x.shape, t.rank
    x_row, row, item, inner_row, low_row = (
        a.strides[d] // a.itemsize for a, d in ((t.x, 0), (t.rows, 0), (t.rows, 1), (t.inner, 0), (t.low, 0))
    )
    steps = [np.int64(s) for s in (0, 0, 0, rank, item, out * rank)]
    sizes = [
        (inner_row, x_row, n * rank // 16, width, 1, targets["down"] is not None),
        (low_row, row, rank // 16, out, n, targets["up"] is not None),
    ]
    counts = [[np.int32(v) for v in side] for side in sizes]
    columns, share = next((c for c in _CUTS if _tiles(t, c[0]) * c[1] >= c[2] * k.multiprocessors), _CUTS[-1])[:2]
    span = -(-m // (share * _DEPTH)) * _DEPTH
    args = (
        t.inner, t.x, made["down"], *steps[:3], *counts[0], t.low, t.rows, made["up"], *steps[3:], *counts[1],
        np.int32(m), np.int32(span),
    )  # fmt: skip
    kernel, grid = f"lora_gradients_{columns}_{share}", (_tiles(t, columns), share)
    launch = partial(k.launch, "lora.cu", kernel, t.x.dtype, grid, _THREADS, args)
    if final:
        k.beside.put(launch, t.x, t.rows, t.inner, t.low, *made.values())
    else:
        launch()
    return {name: list(block) for name, block in made.items()}


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
