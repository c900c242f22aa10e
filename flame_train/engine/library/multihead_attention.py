"""Multi-head attention as a layer, with the names, masks and defaults of torch.nn.MultiheadAttention."""

from __future__ import annotations

import math

from ...errors import ShapeError
from .. import functional as F
from ..dtype import bool_, is_float
from ..nn.layers import Linear
from ..nn.module import Module, compute_copy
from ..nn.spec import param
from ..random import DROPOUT, Rng
from ..tensors.tensor import Tensor, tensor


class MultiheadAttention(Module):
    """softmax(Q K^T / sqrt(head dim)) V in several heads at once (arXiv 1706.03762).

    Weights are named as in PyTorch: `in_proj_weight` (3 E, E) for query, key and value together, and `in_proj_bias` and
    `out_proj`. Where key or value have a width of their own they are `q_proj_weight`, `k_proj_weight`, `v_proj_weight`.

    Args:
        embed_dim: the width E of queries and of the result.
        num_heads: heads, which divide E.
        dropout: the probability with which a weight is dropped.
        bias: whether the projections have biases.
        kdim, vdim: widths of keys and values; None: E.
        batch_first: whether the batch is the first dim.

    Raises:
        ShapeError: heads that do not divide the width.
        ValueError: a dropout outside of [0, 1].
    """

    in_proj_weight: Tensor
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0:
            raise ShapeError(
                f"MultiheadAttention: embed_dim and num_heads must be greater than 0, got {embed_dim} and {num_heads}"
            )
        if embed_dim % num_heads:
            raise ShapeError(f"MultiheadAttention: {embed_dim} channels do not divide into {num_heads} heads")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"MultiheadAttention: expected a probability dropout in [0, 1], got {dropout}")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.kdim = kdim = kdim if kdim is not None else embed_dim
        self.vdim = vdim = vdim if vdim is not None else embed_dim
        self.packed = kdim == vdim == embed_dim
        if self.packed:
            self.in_proj_weight = param(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = param(embed_dim, embed_dim)
            self.k_proj_weight = param(embed_dim, kdim)
            self.v_proj_weight = param(embed_dim, vdim)
        self.in_proj_bias = param(3 * embed_dim, init="zeros") if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        training: bool = True,
        rng: Rng | None = None,
        stream: int = DROPOUT,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attended values and, if wanted, the weights, averaged over heads or (B, heads, L, S).

        query is (L, B, E), key and value (S, B, ·), with batch_first (B, L, E) and (B, S, ·), without a batch (L, E).
        In boolean masks True bars, as in torch.nn.MultiheadAttention and unlike scaled_dot_product_attention; others
        are added. key_padding_mask is (B, S), attn_mask (L, S) or (B * heads, L, S); without a batch (S,), and heads in
        the place of B * heads. `is_causal` bars what lies ahead, with a mask or, unlike torch's, without. Ask for no
        weights where none are needed: only then is the L x S matrix never built. In training weights are dropped with
        probability `dropout`: `rng`, of as many samples as the batch, and `stream` say which, as in `dropout`.

        Raises ShapeError for inputs and masks of other shapes, TypeError for a mask neither bool nor floating.

        Args:
            query: (L, B, E).
            key: (S, B, kdim).
            value: (S, B, vdim).
            key_padding_mask: (B, S), or None.
            need_weights: whether the weights are wanted.
            attn_mask: (L, S) or (B * heads, L, S), or None.
            average_attn_weights: whether they are averaged over heads.
            is_causal: whether a query attends to no later keys.
            training: whether weights are dropped.
            rng, stream: say which, as in `dropout`.

        Returns:
            The values in the shape of query; and the weights (B, L, S) or (B, heads, L, S), or None.
        """
        p = self.dropout if training else 0.0
        single = query.ndim == 2
        self._check(query, key, value, key_padding_mask, attn_mask)
        if single:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (self._heads(t) for t in self._projected(query, key, value))
        bias = self._bias(q, k, key_padding_mask, attn_mask)
        weights = None
        if need_weights:
            weights = self._weights(q, k, bias, is_causal)
            if p:
                weights = _dropped(weights, p, rng, stream)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if single else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, bias, p, is_causal, rng=rng, stream=stream)
        y: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return (y.squeeze(0) if single else y if self.batch_first else y.transpose(0, 1)), weights

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> None:
        """Raises for what does not fit, before a reshape makes it fit."""
        shapes = [t.shape for t in (query, key, value)]
        if {len(s) for s in shapes} not in ({2}, {3}):
            raise ShapeError(
                "MultiheadAttention: expected query, key and value of 3 dims each, or of 2 without a batch, got shapes "
                + ", ".join(map(str, shapes))
            )
        along = 1 if self.batch_first and query.ndim == 3 else 0
        L, S = query.shape[along], key.shape[along]
        batch = () if query.ndim == 2 else (query.shape[1 - along],)
        for name, t, length, width in (
            ("query", query, L, self.embed_dim),
            ("key", key, S, self.kdim),
            ("value", value, S, self.vdim),
        ):
            expected = (*batch, length, width) if along else (length, *batch, width)
            if t.shape != expected:
                raise ShapeError(f"MultiheadAttention: expected a {name} of shape {expected}, got {t.shape}")
        _check_mask("key_padding_mask", padding, (*batch, S))
        _check_mask("attn_mask", attn_mask, (L, S), (math.prod(batch) * self.num_heads, L, S))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Query, key and value through their parts of the input projection."""
        e = self.embed_dim
        thirds = [slice(i * e, (i + 1) * e) for i in range(3)]
        if self.packed:
            w = [compute_copy(self.in_proj_weight)[part] for part in thirds]
        else:
            w = [compute_copy(each) for each in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]
        bias = compute_copy(self.in_proj_bias)
        b = [None if bias is None else bias[part] for part in thirds]
        return [F.linear(x, w[i], b[i]) for i, x in enumerate((query, key, value))]

    def _heads(self, x_BLE: Tensor) -> Tensor:
        """(B, L, E) as (B, heads, L, E / heads)."""
        B, L, E = x_BLE.shape
        return x_BLE.reshape(B, L, self.num_heads, E // self.num_heads).transpose(1, 2)

    def _bias(self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
        """Returns both masks as one to be added to the scores, (B or 1, heads or 1, L or 1, S)."""
        parts = []
        if padding is not None:
            parts.append(_added(padding, q).reshape(q.shape[0], 1, 1, k.shape[2]))
        if attn_mask is not None:
            lead = (1, 1) if attn_mask.ndim == 2 else q.shape[:2]
            parts.append(_added(attn_mask, q).reshape(*lead, q.shape[2], k.shape[2]))
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
        scores = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.mT
        if bias is not None:
            scores = scores + bias
        if is_causal:
            ahead = tensor([[j > i for j in range(k.shape[2])] for i in range(q.shape[2])], device=q.device)
            scores = scores.masked_fill(ahead, -math.inf)
        return scores.softmax(-1)


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if mask is None:
        return
    if mask.dtype != bool_ and not is_float(mask.dtype):
        raise TypeError(f"MultiheadAttention: expected a {name} of bool or floating dtype, got {mask.dtype.name}")
    if mask.shape not in shapes:
        raise ShapeError(
            f"MultiheadAttention: expected a {name} of shape {' or '.join(map(str, shapes))}, got {mask.shape}"
        )


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Returns a boolean mask as minus infinity where it bars."""
    if mask.dtype != bool_:
        return mask
    return tensor(0.0, like.dtype, like.device).masked_fill(mask, -math.inf)


def _dropped(weights: Tensor, p: float, rng: Rng | None, stream: int) -> Tensor:
    """The weights after scaled_dot_product_attention's dropout, whose numbers lie in rows of whole blocks of four."""
    keys = weights.shape[-1]
    return F.dropout(F.pad(weights, (0, -keys % 4)), p, rng=rng, stream=stream)[..., :keys]
