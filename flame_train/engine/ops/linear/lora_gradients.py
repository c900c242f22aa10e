"""The gradients of LoRA's factors: thin products of activations, summed and returned in fp32 whatever their dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.arrays import has_mergeable_rows
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype, float32
from . import skinny_gemm
from .skinny_gemm import SkinnyOperands


def side_by_side(k: Launcher, arrays: Sequence[Array]) -> Array:
    """n arrays (..., C) as (rows, n, C): no copy where they are slices of one buffer."""
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
    """The targets of the arguments `downs` and `ups` of `n` layers."""
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
    """What has arrived, as one dense array that may be written over; None if it does not lie so."""
    block = k.as_stacked_view([t.addend for t in targets]) if all(t.overwrites for t in targets) else None
    return block if block is not None and block.flags.c_contiguous else None
