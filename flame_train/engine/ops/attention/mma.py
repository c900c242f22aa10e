"""When mma_forward.cuh and mma_gradients.cuh are used, and how they are launched: for dropout on tensor cores."""

from __future__ import annotations

import math

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...random import check_rng, kernel_step, least_kept, round_keys
from ..common import conditions
from . import masks
from .factors import query_factors
from .flops import backward_flops, forward_flops
from .inputs import Dropout, Inputs, Saved
from .layout import in_packets, placed
from .tiled import nowhere

_THREADS, _WARPS, _WARP_ROWS = 128, 4, 16  # as in mma.cuh
_OWN = 2 * _WARP_ROWS * _WARPS  # rows of a block, at most
_TILE_BYTES = 8192  # of a tile that passes forward
_GRADIENT_TILE = 32  # and of one of queries with the keys of heads above 64: twice that
_WORDS = 1 << 32


def why_not(
    query: Array, key: Array, value: Array, attn_mask: Array | None, dropout_p: float, scale: float | None
) -> str:
    """Why these kernels cannot be used; "" if they can.

    Args:
        query, key, value, attn_mask, dropout_p, scale: as in `scaled_dot_product_attention`.

    Returns:
        The reason, or "".
    """
    if not dropout_p:
        return "no dropout"
    if not query.ndim == key.ndim == value.ndim == 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return "only (B, H, L, E), and not empty"
    sizes = query.shape[-1], value.shape[-1]
    if any(n % 8 or n > 128 for n in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}: expected multiples of 8, at most 128"
    if reason := conditions.same(conditions.LOW, query, key, value) or masks.why_not(query, attn_mask):
        return reason
    if scale is not None and scale <= 0:
        return f"a scale of {scale}: expected one above 0, which keeps the largest score the largest"
    if least_kept(dropout_p) == _WORDS:
        return "all is dropped"
    if math.prod(query.shape[1:3]) * -(-key.shape[2] // 4) > _WORDS:
        return "more than 2^32 blocks of random numbers a sample"
    capability = int(query.device.compute_capability)
    return "" if capability >= 80 else "its products need compute capability 8.0"


class Problem:
    """The arguments of the kernels for one call, whose rows lie in packets."""

    def __init__(self, k: Launcher, inputs: Inputs, dropout: Dropout) -> None:
        self.k = k
        self.q, self.key, self.value = (in_packets(k, x) for x in (inputs.query, inputs.key, inputs.value))
        shape = (*self.q.shape[:3], self.key.shape[2])
        mask, strides = nowhere(), (0, 0, 0)
        if inputs.attn_mask is not None:
            mask = masks.added(k, inputs.attn_mask, self.q, self.key, _OWN)
            strides = tuple(n // mask.itemsize for n in k.xp.broadcast_to(mask, shape).strides[:3])
        lengths = inputs.key_value_seq_lengths
        lengths = nowhere() if lengths is None else k.contiguous(lengths.astype(np.int32, copy=False))
        rng = check_rng(dropout.rng, "scaled_dot_product_attention: dropout_p")
        samples = k.contiguous(k.xp.asarray(rng.samples).astype(np.int64, copy=False))
        _, heads, queries, keys = shape
        sizes = (heads, heads // self.key.shape[1], queries, keys, self.q.shape[3], self.value.shape[3])
        self.numbers = (
            mask,
            lengths,
            samples,
            *kernel_step(rng.step),
            np.int64(dropout.stream),
            round_keys(rng.seed),
            *map(np.int64, strides),
            *map(np.int32, (inputs.is_causal, *sizes)),
            np.float32(inputs.factor),
            np.uint32(least_kept(dropout.dropout_p)),
            np.float32(1.0 / (1.0 - dropout.dropout_p)),
        )
        self.head = 64 if max(sizes[-2:]) <= 64 else 128

    def forward(self, out: Array, lse: Array) -> None:
        """Fills `out` (B, H, L, V) and the log-sum-exps, fp32 (B, H, L, 1)."""
        self.k.launch_hooks.multiplied("attention", forward_flops(self.q, self.key, self.value))
        self._run("dropout_forward", None, (out, None), lse, _OWN, _OWN * self._row_bytes + 4 * _TILE_BYTES)

    def gradients(self, g: Array, saved: Saved, into: tuple[Array, Array, Array]) -> None:
        """Fills `into` with the gradients of query, key and value, whose memory lies in packets.

        Args:
            g: the gradient of the result, (B, H, L, V).
            saved: what the forward pass left.
            into: memory for the gradients.
        """
        g, out = in_packets(self.k, g), in_packets(self.k, saved.out)
        factors = query_factors(self.k, g, out, saved.lse)
        self.k.launch_hooks.multiplied("attention", backward_flops(self.q, self.key, self.value))
        dq, dk, dv = into
        stages = 4 * _GRADIENT_TILE * self._row_bytes
        self._run("dropout_query", g, (dq, None), factors, _OWN, 2 * _OWN * self._row_bytes + stages)
        own, tile = (_OWN, _GRADIENT_TILE) if self.head == 64 else (_OWN // 2, 2 * _GRADIENT_TILE)
        stages = 2 * tile * (2 * self._row_bytes + 8)  # with factors of the queries that pass
        self._run("dropout_key_value", g, (dk, dv), factors, own, 2 * own * self._row_bytes + stages)

    @property
    def _row_bytes(self) -> int:
        return 2 * self.head

    def _run(
        self, kernel: str, g: Array | None, out: tuple[Array, Array | None], rows: Array, own: int, shared_bytes: int
    ) -> None:
        made = (self.q, self.key, self.value, g, *out)
        batch, heads, length, _ = out[0].shape
        args = [a for x in made for a in ((nowhere(), *[np.int64(0)] * 3) if x is None else placed((x,)))]
        file, grid = f"ops/attention/mma_{self.head}.cu", (-(-length // own) * heads * batch,)
        self.k.launch(file, kernel, self.q.dtype, grid, _THREADS, (*args, rows, *self.numbers), shared_bytes)
