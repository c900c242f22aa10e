"""Attention with masks, grouped heads, a causal mask and all of them together, by cuDNN in bf16 and fp16.

Truth is the fp64 reference on the CPU, on the same rounded inputs. The baseline is the reference in the tested dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.cuda.tuning import SM_90
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import deterministic, use
from flame_train.engine.ops.attention import kernels as head_split

pytestmark = pytest.mark.gpu

BATCH, KEY_HEADS = 2, 2
MASKS = ("none", "keys", "pairs", "heads", "added", "added to keys", "lengths")
Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """What is attended to; `group` heads share keys."""

    mask: str
    causal: bool
    group: int
    lengths: tuple[int, int]
    head: int
    values: int | None = None

    @property
    def learnt(self) -> bool:
        return self.mask.startswith("added")

    def attend(self, qkv: list[Tensor], mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, mask, 0.0, self.causal, **self.named(qkv[0].device))

    def named(self, device: str) -> dict[str, Any]:
        """The arguments that have names."""
        counts = np.array([self.lengths[1], max(1, self.lengths[1] // 3)], np.int32)
        lengths = flame.tensor(counts, device=device) if self.mask == "lengths" else None
        return {"enable_gqa": self.group > 1, "key_value_seq_lengths": lengths}


LENGTHS = (333, 131)
EVERY = [Case(mask, causal, group, LENGTHS, 128) for mask, causal, group in product(MASKS, (False, True), (1, 3))]
SHAPES = [
    Case("pairs", True, 1, (77, 77), 64),
    Case("keys", False, 2, (130, 257), 80),
    Case("added", True, 3, (1, 77), 256),
    Case("keys", True, 2, (65, 1), 40),
    Case("heads", False, 1, (4, 3), 8),
    Case("pairs", True, 2, (200, 300), 160),
    Case("added", False, 1, (64, 128), 64),
    Case("keys", False, 2, (1000, 77), 64),
    Case("pairs", False, 2, (90, 130), 128, 64),
    Case("keys", False, 2, (1, 300), 128),
    Case("keys", False, 1, (1000, 777), 64),
    Case("keys", True, 1, (600, 640), 64),
    Case("lengths", False, 1, (1000, 777), 64),
    Case("lengths", False, 2, (1, 300), 128),
    Case("lengths", True, 1, (600, 640), 80),
    Case("lengths", False, 1, (4200, 4200), 128),
]


def mask_of(case: Case, rng: np.random.Generator) -> Values | None:
    """Boolean masks of pairs and heads have rows in which all is barred, and so has the added one."""
    (queries, keys), heads = case.lengths, KEY_HEADS * case.group
    if case.mask in ("none", "lengths"):
        return None
    if case.mask == "keys":
        return np.arange(keys) < np.array([keys, max(1, keys // 3)])[:, None, None, None]
    if case.mask == "added to keys":
        return rng.standard_normal(keys)
    shape = {"pairs": (BATCH, 1, queries, keys), "heads": (heads, queries, keys), "added": (1, heads, queries, keys)}
    seen = rng.random(shape[case.mask]) < 0.6
    seen[..., queries // 2, :] = False
    return seen if not case.learnt else np.where(seen, rng.standard_normal(seen.shape), -np.inf)


def inputs(case: Case, rounded: str, dtype: str, device: str) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Query, key and value as projections leave them, the mask, and what the output is weighed with."""
    rng, (queries, keys), heads = np.random.default_rng(7), case.lengths, KEY_HEADS * case.group
    mask = mask_of(case, rng)

    def drawn(values: Values, leaf: bool) -> Tensor:
        kind = None if values.dtype == bool else dtype
        held = values if kind is None else values.astype(as_dtype(rounded))
        return flame.tensor(held, kind, device, requires_grad=leaf)

    def by_head(length: int, count: int, width: int, leaf: bool = True) -> Tensor:
        return drawn(rng.standard_normal((BATCH, length, count, width)), leaf).transpose(1, 2)

    wide = case.values or case.head
    found = [by_head(queries, heads, case.head), by_head(keys, KEY_HEADS, case.head), by_head(keys, KEY_HEADS, wide)]
    weight = by_head(queries, heads, wide, leaf=False)
    return found, None if mask is None else drawn(mask, case.learnt), weight


def attended(case: Case, rounded: str, dtype: str, device: str) -> list[Tensor]:
    """The output and all gradients, the learnt mask's too."""
    qkv, mask, weight = inputs(case, rounded, dtype, device)
    leaves = [*qkv, mask] if case.learnt else qkv
    out = case.attend(qkv, mask)
    return [out, *flame.grad([out], leaves, [weight])]


def host(tensors: list[Tensor]) -> list[Values]:
    return [t.numpy().astype(np.float64) for t in tensors]


def check(case: Case, dtype: str) -> None:
    truth = host(attended(case, dtype, "float64", "cpu"))
    got = host(attended(case, dtype, dtype, "cuda"))
    with use(scaled_dot_product_attention="reference"):
        plain = host(attended(case, dtype, dtype, "cuda"))
    unit = float(ml_dtypes.finfo(as_dtype(dtype)).eps)
    for i, (t, g, p) in enumerate(zip(truth, got, plain, strict=True)):
        assert np.isfinite(g).all(), i
        # A gradient that is nought but for rounding is measured by what it is the rounding of: terms of order one.
        allowed = 2.0 * np.linalg.norm(p - t) + unit * max(np.linalg.norm(t), np.sqrt(t.size))
        assert np.linalg.norm(g - t) <= allowed, i


@pytest.mark.parametrize("case", [*EVERY, *SHAPES], ids=str)
def test_outputs_and_gradients(case: Case) -> None:
    check(case, "bfloat16")


@pytest.mark.parametrize("case", [*EVERY[5::4], *SHAPES], ids=str)
def test_outputs_and_gradients_in_fp16(case: Case) -> None:
    check(case, "float16")


@pytest.mark.parametrize("case", EVERY[4::3], ids=str)
def test_outputs_and_gradients_with_sums_in_any_order(case: Case) -> None:
    with deterministic(False):
        check(case, "bfloat16")


@pytest.mark.parametrize("case", [*EVERY[2:], *SHAPES], ids=str)
def test_tensor_cores_are_used(case: Case) -> None:
    """Forward and for every gradient."""
    qkv, mask, _ = inputs(case, "bfloat16", "bfloat16", "cuda")
    given = (*qkv, mask, 0.0, case.causal)
    ways = [flame.explain(F.scaled_dot_product_attention, *given, **case.named("cuda"))]
    ways += flame.explain_gradients(F.scaled_dot_product_attention, *given, **case.named("cuda")).values()
    assert all(any(why == "chosen" and impl in ("cudnn", "wgmma", "short_kv") for impl, why in way) for way in ways)


@pytest.mark.parametrize("case", [*EVERY[1::2], *SHAPES], ids=str)
def test_the_same_in_every_run_and_captured(case: Case) -> None:
    first = host(attended(case, "bfloat16", "bfloat16", "cuda"))
    second = host(attended(case, "bfloat16", "bfloat16", "cuda"))
    kept: list[Tensor] = []

    def step() -> None:
        kept[:] = [out := F.scaled_dot_product_attention(*qkv, mask, 0.0, case.causal, **named)]
        kept.extend(flame.grad([out], [*qkv, mask] if case.learnt else qkv, [weight]))

    (qkv, mask, weight), named = inputs(case, "bfloat16", "bfloat16", "cuda"), case.named("cuda")
    captured = flame.capture(step, "cuda")
    for _ in range(3):  # tried, captured, replayed
        captured()
    for a, b, c in zip(first, second, host(kept), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_may_look_nowhere_gets_zeros_and_gives_none(causal: bool, dtype: str) -> None:
    case = Case("pairs", causal, 2, (70, 90), 64)
    out, dq, dk, dv = host(attended(case, dtype, dtype, "cuda"))
    assert not out[:, :, 35].any()
    assert not dq[:, :, 35].any()
    qkv, mask, weight = inputs(case, dtype, dtype, "cuda")
    alone = flame.tensor(np.where(np.arange(70)[:, None] == 35, 1.0, 0.0), dtype, "cuda")
    made = F.scaled_dot_product_attention(*qkv, mask, 0.0, causal, enable_gqa=True)
    for g in flame.grad([made], qkv, [weight * alone]):
        assert not g.numpy().any()
    assert dk.any()
    assert dv.any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_that_sees_no_key_has_no_gradients(causal: bool) -> None:
    """Nor has any key that is barred, whose scores would be infinite: by the kernel for heads of 64."""
    queries, keys, rng = 700, 650, np.random.default_rng(3)
    seen = rng.random((3, 1, 1, keys)) < 0.5
    seen[1] = False
    seen[2, ..., 128:256] = False
    k = rng.standard_normal((3, 4, keys, 64)) * np.where(seen, 1.0, 1e4).swapaxes(2, 3)
    given = [rng.standard_normal((3, 4, queries, 64)), k, rng.standard_normal((3, 4, keys, 64))]
    q, k, v = (flame.tensor(x, "bfloat16", "cuda", requires_grad=True) for x in given)
    mask, g = flame.tensor(seen, device="cuda"), flame.tensor(rng.standard_normal(q.shape), "bfloat16", "cuda")
    way = flame.explain_gradients(F.scaled_dot_product_attention, q, k, v, mask, 0.0, causal)["key"]
    assert ("wgmma", "chosen") in way or get_backend("cuda").kernels.compute_capability != 90
    found = host(list(flame.grad([F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)], [q, k, v], [g])))
    for x in found:
        assert np.isfinite(x).all()
        assert not x[1].any()
        assert x[0].any()
    for x in found[1:]:
        assert not x[np.broadcast_to(~seen[:, :, 0], x.shape[:3])].any()


def test_padding_has_no_gradient_and_is_not_read() -> None:
    """Whatever stands there, and whatever stood where its gradient goes."""
    queries, keys, own = 300, 500, (500, 130)
    found = []
    for filling in (0.0, 1e4, -1e4):
        rng = np.random.default_rng(4)
        given = [rng.standard_normal((2, n, 4, 128)) for n in (queries, keys, keys, queries)]
        for x in given[1:3]:
            x[1, own[1] :] = filling
        q, k, v, g = (flame.tensor(x, "bfloat16", "cuda", requires_grad=True).transpose(1, 2) for x in given)
        lengths = flame.tensor(np.array(own, np.int32), device="cuda")
        spoilt = flame.tensor(np.full((2, keys, 3, 4, 128), np.nan), "bfloat16", "cuda")
        del spoilt  # memory that the gradients may get
        out = F.scaled_dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
        found.append(host([out, *flame.grad([out], [q, k, v], [g.detach()])]))
    for results in found:
        for x, first in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(x, first)
        for x in results[2:]:
            assert not x[1, :, own[1] :].any()
            assert x[1, :, : own[1]].any()


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_share_keys_in_two_parts(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fixed order of sums: the gradients of all at once."""
    rng, multiprocessors = np.random.default_rng(0), get_backend("cuda").kernels.multiprocessors
    heads = (multiprocessors // 8 + 8) // 2 * 2
    shapes = [(batch, n, 1024, 128) for n in (heads, heads // 2, heads // 2, heads)]
    q, k, v, g = (flame.tensor(rng.standard_normal(s), "bfloat16", "cuda", requires_grad=True) for s in shapes)
    mask = flame.tensor(rng.random((heads, 1024, 1024)) < 0.5, device="cuda")
    found = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(head_split, "SM_90", replace(SM_90, head_split_bytes=least))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        found.append(host(list(flame.grad([out], [q, k, v], [g.detach()]))))
    assert head_split.larger_part(batch, heads, 1024, 1024, 2, multiprocessors, 2) < heads
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
