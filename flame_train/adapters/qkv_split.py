"""One module here, several in diffusers: a LoRA cut up as the weight is, and put together again.

Every part of a cut LoRA keeps the whole down matrix and its own rows of the up matrix. The way back finds equal down
matrices and has the LoRA it came from. Separately trained parts have separate down matrices. They are stacked, up
becomes block-diagonal, and the rank is the sum. Such a LoRA is split along its blocks if these have one rank. Then
numbers only change places, and each way undoes the other bit for bit. Parts of different ranks come back with the
rank of the whole: the same update, in a larger file. Different scales are multiplied into the up matrices. Parts that
are stored in different formats come back in fp32, which holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flame_train.adapters.factors import Array, LoraFactors
from flame_train.adapters.folding import fold
from flame_train.io.keymap import Op, Shape, Source

Paths = Mapping[str, Source]
"""A module's paths in diffusers, each with how its rows are taken from the whole."""


def split(whole: LoraFactors, paths: Paths, blocks: bool = True) -> dict[str, LoraFactors]:
    """Returns the LoRA of each path. With `blocks`, those that a block-diagonal one says nothing about are left out."""
    ups = {path: source.apply([whole.up]) for path, source in paths.items()}
    parts = _blocks(whole, ups) if blocks and len(ups) > 1 else None
    return parts or {path: LoraFactors(whole.down, up, whole.alpha) for path, up in ups.items()}


def check_splittable(whole: LoraFactors, paths: Paths) -> LoraFactors:
    """Returns `whole`, known to have rows that its paths can share. ValueError for one that has not."""
    shape: Shape = whole.up.shape
    for source in paths.values():
        if source.made_shape(dict.fromkeys(source.names, shape)) is None:
            parts = 2 if source.op is Op.SWAP else source.parts
            raise ValueError(f"its up matrix has {shape[0]} rows, which is no multiple of {parts}")
    return whole


def join(parts: Mapping[str, LoraFactors], paths: Paths) -> LoraFactors:
    """Returns the LoRA of the whole module; paths that are not among `parts` stay as they are.

    ValueError for parts whose shapes do not belong to one weight.
    """
    if len(paths) == 1:
        ((path, source),) = paths.items()
        own = check_splittable(parts[path], paths)
        return LoraFactors(own.down, source.apply([own.up]), own.alpha)  # exchanging halves undoes itself
    present = [path for path in paths if path in parts]
    unit = _unit(parts, paths)
    if _alike([parts[path] for path in present]):
        first = parts[present[0]]
        rows = {path: parts[path].up for path in present}
        return LoraFactors(first.down, _filled(rows, paths, unit, first.rank), first.alpha)
    return _stacked({path: parts[path] for path in present}, paths, unit)


def _blocks(whole: LoraFactors, ups: Mapping[str, Array]) -> dict[str, LoraFactors] | None:
    """Returns the parts of a block-diagonal LoRA; None if it is no such thing, or would not come back as it is."""
    present = [path for path, up in ups.items() if _bits(up)]
    if not present or whole.rank % len(present) or whole.alpha / len(present) * len(present) != whole.alpha:
        return None
    rank = whole.rank // len(present)
    blocks: dict[str, LoraFactors] = {}
    for i, path in enumerate(present):
        block = slice(i * rank, (i + 1) * rank)
        if _bits(np.delete(ups[path], np.arange(whole.rank)[block], axis=1)):
            return None
        blocks[path] = LoraFactors(whole.down[block], ups[path][:, block], whole.alpha / len(present))
    return None if len(blocks) > 1 and _alike(list(blocks.values())) else blocks


def _stacked(parts: Mapping[str, LoraFactors], paths: Paths, unit: int) -> LoraFactors:
    """Joins block by block. Where scales differ they go into the up matrices."""
    factors = list(parts.values())
    if len({f.scale for f in factors}) == 1:
        equal = len({f.rank for f in factors}) == 1
        total = sum(f.rank for f in factors)
        alpha = factors[0].alpha * len(factors) if equal else factors[0].scale * total
        ups = [f.up for f in factors]
    else:
        alpha, ups = float(sum(f.rank for f in factors)), [fold(f) for f in factors]
    of_downs, of_ups = holding([f.down for f in factors]), holding(ups)
    down = np.concatenate([f.down.astype(of_downs, copy=False) for f in factors])
    rows, begin = {}, 0
    for path, up in zip(parts, ups, strict=True):
        rows[path] = np.zeros((len(up), len(down), *up.shape[2:]), of_ups)
        rows[path][:, begin : begin + up.shape[1]] = up
        begin += up.shape[1]
    return LoraFactors(down, _filled(rows, paths, unit, len(down)), alpha)


def _filled(rows: Mapping[str, Array], paths: Paths, unit: int, rank: int) -> Array:
    """Returns the up matrix of the whole from its parts' rows, zero for those that are not there."""
    some, dtype = next(iter(rows.values())), holding(list(rows.values()))
    missing = {path: (unit * source.span, rank, *some.shape[2:]) for path, source in paths.items() if path not in rows}
    return np.concatenate(
        [rows[p].astype(dtype, copy=False) if p in rows else np.zeros(missing[p], dtype) for p in paths]
    )


def holding(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Returns a dtype that holds the values of all `arrays`: theirs, or fp32. NumPy knows none for fp16 and bf16."""
    dtypes = {array.dtype for array in arrays}
    return dtypes.pop() if len(dtypes) == 1 else np.result_type(np.float32, *(d for d in dtypes if d.itemsize > 4))


def _unit(parts: Mapping[str, LoraFactors], paths: Paths) -> int:
    """Returns the rows that one share of the weight has."""
    units = {f.up.shape[0] / paths[path].span for path, f in parts.items()}
    inputs = {f.down.shape[1:] for f in parts.values()}
    if len(units) > 1 or len(inputs) > 1 or not next(iter(units)).is_integer():
        raise ValueError(", ".join(f"{path} is {f.weight_shape}" for path, f in parts.items()))
    return int(units.pop())


def _alike(factors: list[LoraFactors]) -> bool:
    """Says whether the parts have one down matrix and one alpha."""
    first = factors[0]
    return all(
        f.alpha == first.alpha and f.down.dtype == first.down.dtype and f.down.tobytes() == first.down.tobytes()
        for f in factors
    )


def _bits(x: Array) -> bool:
    """Says whether any bit is set: minus zero counts."""
    return bool(np.frombuffer(x.tobytes(), np.uint8).any())
