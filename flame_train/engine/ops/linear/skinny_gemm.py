"""The gradients of thin factors, two products of activations at once: when and how skinny_gemm.cuh is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.arrays import has_mergeable_rows
from ...backend.cuda.hopper import tensor_map, warpgroup_product
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.nvrtc import included, struct
from ...dtype import Array, DType, compute_dtype, float32
from ..common import conditions
from . import skinny_gemm

_DEPTH, _BLOCK, _BAND, _THREADS = 64, 64, 16, 160  # as there

_ALIGNMENT = 1024

_SHARED_BYTES = (62 << 10, 75 << 10)  # bytes of shared memory for a block, by how many times _BLOCK columns it makes

_SIDE = np.dtype([("c", "u8"), ("c_step", "i8"), ("width", "i4"), ("count", "i4"), ("adds", "i4")], align=True)


@dataclass(frozen=True, slots=True)
class SkinnyOperands:
    """The operands of the factors' gradients for n layers of one input.

    They are `grad_hidden`^T x for down and `rows`^T lora_hidden for up. x (M, K) is the input, rows (M, n, N) the
    outputs' gradients. lora_hidden (M, n rank) are the low-rank activations, grad_hidden (M, n rank) their gradients.
    """

    x: Array
    rows: Array
    grad_hidden: Array
    lora_hidden: Array
    rank: int

    def shape(self, name: str) -> tuple[int, int, int]:
        """Returns the shape of the stacked gradients of "down" or "up"."""
        n, out = self.rows.shape[1:]
        return (n, self.rank, self.x.shape[1]) if name == "down" else (n, out, self.rank)


def fit(k: Launcher, t: SkinnyOperands) -> bool:
    """Whether the kernel makes both products in one launch: with thin factors, launching costs more than computing."""
    m, (n, out) = len(t.x), t.rows.shape[1:]
    arrays = (t.x, t.rows, t.grad_hidden, t.lora_hidden)
    return (
        k.compute_capability == 90
        and not conditions.same(conditions.LOW, *arrays)
        and t.rank % _BAND == 0
        and n * t.rank <= 64
        and m >= k.tuning.skinny_gemm_rows
        and not (t.x.shape[1] % 8 or out % 8)
        and all(a.strides[-1] == a.itemsize and a.data.ptr % 16 == 0 for a in arrays)
        and all(s % 16 == 0 for a in arrays for s in a.strides[:-1])
    )


def both(k: Launcher, t: SkinnyOperands, targets: Mapping[str, Any], deferrable: bool) -> dict[str, list[Array]]:
    """Both gradients in one launch, added to the targets if there are any; on a side stream if all are `deferrable`."""
    made = {n: k.empty(t.shape(n), float32) if target is None else target for n, target in targets.items()}
    (n, out), (m, width), rank = t.rows.shape[1:], t.x.shape, t.rank
    wide, share = cut(n, out, width, k.multiprocessors)
    bands = n * rank // _BAND, rank // _BAND
    stage_bytes = 2 * _DEPTH * (wide * _BLOCK + _BAND * max(bands))
    stages = _SHARED_BYTES[wide - 1] // stage_bytes
    span = -(-m // (share * _DEPTH)) * _DEPTH
    maps = (
        tensor_map(t.grad_hidden, (_DEPTH, _BAND)),
        tensor_map(t.x[None], (_DEPTH, _BLOCK)),
        tensor_map(t.lora_hidden, (_DEPTH, _BAND)),
        tensor_map(t.rows.transpose(1, 0, 2), (_DEPTH, _BLOCK)),
    )
    sides = (
        (made["down"].data.ptr, 0, width, 1, targets["down"] is not None),
        (made["up"].data.ptr, out * rank, out, n, targets["up"] is not None),
    )
    k.launch_hooks.multiplied("LoRA factor gradients", 2 * m * rank * n * (width + out))
    launch = partial(
        k.launch_sm90,
        _text(t.x.dtype, *bands, share, wide, stages),
        "lora_gradients",
        t.x.dtype,
        (_tiles(n, out, width, wide), share),
        _THREADS,
        (*maps, *(struct(side, _SIDE) for side in sides), np.int32(m), np.int32(span)),
        _ALIGNMENT + stages * stage_bytes,
    )
    if deferrable:
        k.side_stream.run(launch, t.x, t.rows, t.grad_hidden, t.lora_hidden, *made.values())
    else:
        launch()
    return {name: list(block) for name, block in made.items()}


def cut(n: int, out: int, width: int, multiprocessors: int) -> tuple[int, int]:
    """Returns how many times _BLOCK columns a block makes, and how many blocks, a cluster, share the rows of these.

    A third of the card is enough: the launch runs beside products that keep the rest busy.
    """
    for wide, shares in ((2, (1, 2, 4)), (1, (1, 2, 4, 8))):
        for share in shares:
            if 3 * _tiles(n, out, width, wide) * share >= multiprocessors:
                return wide, share
    return 1, 8


def _tiles(n: int, out: int, width: int, wide: int) -> int:
    return -(-width // (wide * _BLOCK)) + n * -(-out // (wide * _BLOCK))


@cache
def _text(dtype: DType, bands: int, bands_up: int, share: int, wide: int, stages: int) -> str:
    numbers = {"BANDS": bands, "BANDS_UP": bands_up, "SHARE": share, "WIDE": wide, "STAGES": stages}
    defined = "".join(f"#define {name} {value}\n" for name, value in numbers.items())
    products = "".join(
        warpgroup_product("turned", _BAND * n, True, dtype, turned=True) for n in sorted({bands, bands_up})
    )
    return defined + products + included('#include "ops/linear/skinny_gemm.cuh"\n')


def side_by_side(k: Launcher, arrays: Sequence[Array]) -> Array:
    """Returns n arrays (..., C) as (rows, n, C): no copy where they are slices of one buffer."""
    first = arrays[0]
    shape = len(arrays), math.prod(first.shape[:-1]), first.shape[-1]
    if all(has_mergeable_rows(a) for a in arrays):
        return k.stacked([a.reshape(shape[1:]) for a in arrays]).transpose(1, 0, 2)
    joined = k.empty(shape, first.dtype)  # reshaping would copy each, and a view of the copies would not hold them
    k.copy([part.reshape(first.shape) for part in joined], arrays)
    return joined.transpose(1, 0, 2)


Wanted = Mapping[str, Sequence[GradTarget]]
"""The gradients wanted, "down" or "up", each with the targets of the n layers."""


def listed(targets: GradTargets, n: int) -> Wanted:
    """Returns the targets of the arguments `downs` and `ups` of `n` layers."""
    return {a: [targets[f"{a}s"].get(i, ALLOCATE) for i in range(n)] for a in ("down", "up") if f"{a}s" in targets}


def factor_gradients(k: Launcher, t: SkinnyOperands, wanted: Wanted) -> dict[str, list[Array]]:
    """The factors' gradients in fp32 or fp64, a list for each name, added to what has arrived at their targets."""
    blocks = {n: _block(k, targets) for n, targets in wanted.items()}
    in_place = all(
        blocks[n].dtype == float32 if blocks[n] is not None else all(each.addend is None for each in targets)
        for n, targets in wanted.items()
    )
    if len(wanted) == 2 and in_place and skinny_gemm.fit(k, t):
        deferrable = all(each.deferrable for targets in wanted.values() for each in targets)
        made = skinny_gemm.both(k, t, blocks, deferrable)
        return {n: made[n] if blocks[n] is None else [each.addend for each in wanted[n]] for n in wanted}
    n, rank = t.rows.shape[1], t.rank
    products = {
        "down": (t.grad_hidden.T, t.x),
        "up": (t.rows.transpose(1, 2, 0), t.lora_hidden.reshape(-1, n, rank).transpose(1, 0, 2)),
    }
    found = {}
    for name, targets in wanted.items():
        a, b = products[name]
        if (block := blocks[name]) is not None:
            out = block.reshape(*a.shape[:-1], b.shape[-1])
            k.matmul(a, b, out=out, plus=out)
            found[name] = [each.addend for each in targets]
        else:
            made = k.matmul(a, b, out_dtype=compute_dtype(a.dtype)).reshape(t.shape(name))
            pairs = zip(made, targets, strict=True)
            found[name] = [g if each.addend is None else g + each.addend for g, each in pairs]
    return found


def _block(k: Launcher, targets: Sequence[GradTarget]) -> Any:
    """Returns what has arrived, as one dense array that may be written over; None if it does not lie so."""
    block = k.as_stacked_view([t.addend for t in targets]) if all(t.overwrites for t in targets) else None
    return block if block is not None and block.flags.c_contiguous else None
