"""The arguments of attention that travel together, and what every implementation derives from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ....errors import ShapeError
from ...arguments import Arguments
from ...dtype import Array
from ...namespace import Namespace
from ...random import Rng, blocks_of_bits, check_rng, uniform_of
from ..common.dims import Shape


@dataclass(frozen=True, slots=True)
class Inputs(Arguments):
    """The arguments of attention, dropout aside.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, V).
        attn_mask: truth values, or numbers to add to the scores; broadcasts to (..., L, S). None: no mask.
        is_causal: whether query i looks at keys 0 to i alone.
        scale: factor of the scores; None: 1 / sqrt(E).
        enable_gqa: whether key and value have fewer heads, dim -3, than query.
        key_value_seq_lengths: of each sample, the first dim, how many keys are looked at, from the first on; None: all.
    """

    query: Array
    key: Array
    value: Array
    attn_mask: Array | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    key_value_seq_lengths: Array | None

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return self.scale if self.scale is not None else float(self.query.shape[-1] ** -0.5)

    def check(self) -> None:
        """Raises ShapeError unless query, key and value fit each other."""
        query, key, value = self.query, self.key, self.value
        fit = min(query.ndim, key.ndim, value.ndim) > 1
        fit = fit and query.shape[-1] == key.shape[-1] and key.shape[:-1] == value.shape[:-1]
        if self.enable_gqa:
            fit = fit and query.ndim > 2 and query.shape[:-3] == key.shape[:-3]
            fit = fit and query.shape[-3] % key.shape[-3] == 0
        if not fit or (not self.enable_gqa and query.shape[:-2] != key.shape[:-2]):
            raise ShapeError(
                "scaled_dot_product_attention: expected query (..., L, E), key (..., S, E), value (..., S, V), "
                f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        lengths = self.key_value_seq_lengths
        if lengths is None:
            return
        if query.ndim < 3 or lengths.shape != query.shape[:1] or lengths.dtype.kind not in "iu":
            raise ShapeError(
                "scaled_dot_product_attention: expected key_value_seq_lengths of whole numbers, one for each sample of "
                f"query {tuple(query.shape)}, got {tuple(lengths.shape)} of {lengths.dtype.name}"
            )

    def by_group(self) -> Inputs:
        """The same with dim -3 split so that all broadcast, for H heads of keys, each shared by G heads of queries.

        query becomes (..., H, G, L, E), key and value (..., H, 1, S, E), if `enable_gqa`. A mask gets 2 dims at least.
        """
        query, key, mask = self.query, self.key, self.attn_mask
        if mask is not None and mask.ndim < 2:
            mask = mask.reshape(*(1,) * (2 - mask.ndim), *mask.shape)
        if not self.enable_gqa:
            return replace(self, attn_mask=mask)
        heads = key.shape[-3]
        query = query.reshape(*query.shape[:-3], heads, query.shape[-3] // heads, *query.shape[-2:])
        if mask is not None and mask.ndim > 2:
            each = (heads, query.shape[-3]) if mask.shape[-3] != 1 else (1, 1)
            mask = mask.reshape(*mask.shape[:-3], *each, *mask.shape[-2:])
        key, value = key[..., None, :, :], self.value[..., None, :, :]
        return replace(self, query=query, key=key, value=value, attn_mask=mask)

    def scores(self, xp: Namespace, rows: slice) -> Array:
        """Returns the scaled, masked scores of some query rows, (..., rows, S), of what `by_group` returned."""
        s = xp.matmul(self.query[..., rows, :], self.key.swapaxes(-1, -2)) * self.factor
        if self.is_causal:
            below = xp.arange(rows.start, rows.stop)[:, None] >= xp.arange(self.key.shape[-2])[None, :]
            s = xp.where(below, s, -math.inf)
        if self.attn_mask is not None:
            part = self.attn_mask[..., rows, :] if self.attn_mask.shape[-2] != 1 else self.attn_mask
            s = xp.where(part, s, -math.inf) if self.attn_mask.dtype == bool else s + part
        if self.key_value_seq_lengths is not None:
            lengths = self.key_value_seq_lengths.reshape(-1, *(1,) * (s.ndim - 1))
            s = xp.where(xp.arange(s.shape[-1]) < lengths, s, -math.inf)
        return s


@dataclass(frozen=True, slots=True)
class Saved(Arguments):
    """What the forward pass leaves to the gradients: the result (..., L, V), and log-sum-exps of rows (..., L, 1)."""

    out: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class Dropout(Arguments):
    """Which probabilities are zeroed: each with `dropout_p`, by the numbers of `rng` and `stream`."""

    dropout_p: float
    rng: Rng | None
    stream: int

    def check(self, query: Array) -> None:
        """Raises ValueError for no probability or a missing `rng`, ShapeError for one of other samples."""
        if not 0.0 <= self.dropout_p <= 1.0:
            raise ValueError(
                f"scaled_dot_product_attention: expected a probability dropout_p in [0, 1], got {self.dropout_p}"
            )
        if not self.dropout_p:
            return
        rng = check_rng(self.rng, "scaled_dot_product_attention: dropout_p")
        samples = query.shape[0] if query.ndim > 2 else 1
        if rng.samples.shape != (samples,):
            raise ShapeError(
                f"scaled_dot_product_attention: rng has {rng.samples.size} samples, query {tuple(query.shape)} "
                f"{samples}"
            )

    def kept(self, xp: Namespace, scores: Array, queries: Shape, rows: slice) -> Array | None:
        """Returns the dropout mask in the scores' shape, scaled: 0 or 1 / (1 - dropout_p). None: nothing is dropped.

        A sample's numbers lie as (heads, L, S rounded up to blocks of four), so that any rows can be drawn alone.

        Args:
            scores: the scores (..., rows, S).
            queries: the shape of all queries, (..., L, E), before `by_group`.
            rows: the query rows of the scores.
        """
        p, rng, heads = self.dropout_p, self.rng, math.prod(queries[1:-2])
        if rng is None or not p:
            return None
        count = scores.shape[-1]
        per_row = -(-count // 4)
        here, head = xp.arange(rows.start, rows.stop, dtype=np.uint64), xp.arange(heads, dtype=np.uint64)
        row = (head[:, None] * queries[-2] + here) * per_row
        block = (row[..., None] + xp.arange(per_row, dtype=np.uint64)).reshape(-1)
        words = blocks_of_bits(xp, rng.seed, self.stream, rng.step, xp.asarray(rng.samples), block)
        kept = uniform_of(words.reshape(-1, 4 * per_row)[:, :count]) >= np.float32(p)
        return (kept * scores.dtype.type(0.0 if p == 1.0 else 1.0 / (1.0 - p))).reshape(scores.shape)
