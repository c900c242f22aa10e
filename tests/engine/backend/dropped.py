"""Attention with dropout on tensor cores beside the reference: for test_dropped_attention.py and tests/gpu.

Truth is fp64 on the rounded inputs, on the CPU. The rule is that of tests/gpu: at most twice the error of the reference
in the tested dtype plus one ulp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, float64
from flame_train.engine.random import Rng

Values = np.ndarray[Any, Any]
SAMPLES = np.array([4, 2**31 + 1, 0])


@dataclass(frozen=True)
class Case:
    """Sizes (batch, heads, key heads, queries, keys), head sizes of keys and values, and what bars keys.

    With "lengths" there is no mask; the second sample has no keys.
    """

    sizes: tuple[int, int, int, int, int]
    head: tuple[int, int] = (64, 64)
    mask: str = ""
    causal: bool = False
    p: float = 0.3
    scale: float | None = None

    @property
    def blind(self) -> int:
        """The query that a mask of pairs, or an added one, lets look nowhere."""
        return self.sizes[3] // 2


def mask_of(case: Case) -> Values | None:
    """Truth values of keys or pairs, or numbers to add."""
    rng, (batch, heads, _, queries, keys) = np.random.default_rng(5), case.sizes
    if case.mask in ("", "lengths"):
        return None
    if case.mask == "keys":
        return np.arange(keys) < np.array([keys // 3 + 1, keys, 1])[:batch, None, None, None]
    if case.mask == "added to keys":
        return rng.standard_normal(keys)
    seen = rng.random((batch, 1, queries, keys) if case.mask == "pairs" else (heads, queries, keys)) < 0.6
    seen[..., case.blind, :] = False
    return seen if case.mask == "pairs" else np.where(seen, rng.standard_normal(seen.shape), -np.inf)


def chance(device: str, batch: int) -> Rng:
    """Random numbers whose step, samples and seed have high bits."""
    xp = get_backend(device).references
    return Rng(xp, 2**63 + 11, xp.asarray(2**32 - 5), xp.asarray(SAMPLES[:batch]))


def call(case: Case, drawn: DType, dtype: DType, device: str) -> tuple[list[Any], dict[str, Any], Tensor]:
    """Arguments, of heads that lie beside each other as projections leave them, and what the output is weighed with."""
    batch, heads, key_heads, queries, keys = case.sizes
    rng, (width, wide) = np.random.default_rng(1), case.head
    shapes = [(queries, heads, width), (keys, key_heads, width), (keys, key_heads, wide), (queries, heads, wide)]
    given = [rng.standard_normal((batch, *s)).astype(drawn) for s in shapes]
    q, k, v, g = (flame.tensor(x, dtype, device, requires_grad=True).transpose(1, 2) for x in given)
    mask = mask_of(case)
    if mask is not None:
        kind = None if mask.dtype == bool else dtype
        mask = flame.tensor(mask if kind is None else mask.astype(drawn), kind, device)
    ends = np.array([keys, 0, keys // 3 + 1][:batch])
    lengths = flame.tensor(ends, device=device) if case.mask == "lengths" else None
    how = {
        "enable_gqa": heads != key_heads,
        "rng": chance(device, batch),
        "stream": 40,
        "scale": case.scale,
        "key_value_seq_lengths": lengths,
    }
    return [q, k, v, mask, case.p, case.causal], how, g.detach()


def attended(case: Case, drawn: DType, dtype: DType, device: str) -> list[Values]:
    """The output and gradients; on a GPU by the kernels for dropout alone."""
    given, how, g = call(case, drawn, dtype, device)
    if device == "cuda":
        ways = [flame.explain(F.scaled_dot_product_attention, *given, **how)]
        found = flame.explain_gradients(F.scaled_dot_product_attention, *given, **how)
        ways += [found[name] for name in ("query", "key", "value")]
        assert all(("mma", "chosen") in way for way in ways)
    made = F.scaled_dot_product_attention(*given, **how)
    return [np.asarray(x.numpy(), np.float64) for x in (made, *flame.grad(made, given[:3], g))]


def check(case: Case, dtype: DType) -> None:
    """Output and gradients; and that a query that may look nowhere gets zeros, and no gradient."""
    got, plain, truth = (attended(case, dtype, *how) for how in ((dtype, "cuda"), (dtype, "cpu"), (float64, "cpu")))
    unit = float(ml_dtypes.finfo(dtype).eps)
    for i, (g, p, t) in enumerate(zip(got, plain, truth, strict=True)):
        assert np.isfinite(g).all(), i
        # A gradient that is nought but for rounding is measured by what it is the rounding of: terms of order one.
        allowed = 2.0 * np.linalg.norm(p - t) + unit * max(np.linalg.norm(t), np.sqrt(t.size))
        assert np.linalg.norm(g - t) <= allowed, i
    if case.mask in ("pairs", "added"):
        assert not got[0][:, :, case.blind].any()
        assert not got[1][:, :, case.blind].any()


def check_what_falls(case: Case, dtype: DType) -> None:
    """Values that are an identity show each probability: the same ones are dropped as by the reference."""
    shown = []
    for device in ("cuda", "cpu"):
        (q, k, _, *rest), how, _ = call(case, dtype, dtype, device)
        eye = np.broadcast_to(np.eye(case.sizes[4], case.head[1]), (*k.shape[:3], case.head[1]))
        v = flame.tensor(np.ascontiguousarray(eye, dtype), dtype, device)
        shown.append(F.scaled_dot_product_attention(q, k, v, *rest, **how).numpy() == 0)
    np.testing.assert_array_equal(*shown)
