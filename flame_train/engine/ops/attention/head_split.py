"""How many heads at a time cuDNN's gradients of attention are requested: some write all scores down.

With a mask they do so in either mode, and have no plan for 2^31 scores and more. Then samples come one by one, and
their heads in parts that stay below. Without one they do so in a fixed order. On compute capability 9.0 each of its
blocks takes 128 keys of a head, and time goes by rounds of as many blocks as there are multiprocessors. Where the heads
in two parts take no round more, they need about half the memory.
"""

from __future__ import annotations

from ...backend.cuda.tuning import SM_90
from ...dtype import Array
from ...mode import mode

Part = tuple[slice, slice, slice]

_TILE = 128  # keys
_MOST_SCORES = 1 << 31


def head_parts(query: Array, key: Array, multiprocessors: int, masked: bool = False) -> list[Part]:
    """Samples, heads of (B, H, L, E) query, all at once or in two parts, and heads of the keys that they look at."""
    batch, heads, length, _ = query.shape
    if masked and batch * heads * length * key.shape[-2] >= _MOST_SCORES:
        return _below_most_scores(query, key)
    if not mode().deterministic or int(query.device.compute_capability) != 90:
        return [(slice(None), slice(heads), slice(key.shape[1]))]
    group = heads // key.shape[1]
    first = larger_part(batch, heads, length, key.shape[-2], query.itemsize, multiprocessors, group)
    parts = [part for part in (slice(first), slice(first, heads)) if part.start != heads]
    return [(slice(None), part, slice((part.start or 0) // group, part.stop // group)) for part in parts]


def _below_most_scores(query: Array, key: Array) -> list[Part]:
    """One sample at a time, and as many of its heads as have fewer than 2^31 scores."""
    (batch, heads, length, _), keys = query.shape, key.shape[-2]
    group = heads // key.shape[1]
    count = max(group, (_MOST_SCORES - 1) // (length * keys) // group * group)
    starts = range(0, heads, count)
    return [
        (slice(i, i + 1), slice(n, min(n + count, heads)), slice(n // group, min(n + count, heads) // group))
        for i in range(batch)
        for n in starts
    ]


def larger_part(
    batch: int, heads: int, queries: int, keys: int, itemsize: int, multiprocessors: int, group: int = 1
) -> int:
    """How many heads are requested at once: the fewest from half of them on that cost no round, or all.

    Heads that share keys, a `group`, stay together.

    Args:
        batch, heads, queries, keys: the sizes B, H, L and S.
        itemsize: bytes of a score.
        multiprocessors: those of the GPU.
        group: heads that share keys.

    Returns:
        The number of heads.
    """
    if batch * heads * queries * keys * itemsize < SM_90.head_split_bytes:
        return heads

    def rounds(count: int) -> int:
        return -(-batch * count * -(-keys // _TILE) // multiprocessors)

    halves = range(-(-heads // (2 * group)) * group, heads, group)
    return next((n for n in halves if rounds(n) + rounds(heads - n) <= rounds(heads)), heads)
