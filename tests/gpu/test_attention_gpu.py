"""Attention to captions, and to keys that fill no tile, its operands lying as networks have them."""

from __future__ import annotations

from dataclasses import replace

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
from flame_train.engine.ops.attention import short_kv, wgmma

pytestmark = pytest.mark.gpu


def found_and_gradients(length: int, keys: int, rounded: str, dtype: str, device: str) -> list[np.ndarray]:
    """For queries in rows (B, L, H * E), and keys and values side by side in one array, as of one product."""
    rng, heads = np.random.default_rng(length), 5

    def drawn(*shape: int, leaf: bool = True) -> Tensor:
        return flame.tensor(rng.standard_normal(shape).astype(as_dtype(rounded)), dtype, device, requires_grad=leaf)

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], heads, 64).transpose(1, 2)

    leaves = drawn(2, length, heads * 64), drawn(2, keys, heads * 128)
    k, v = F.chunk(leaves[1], 2, dim=-1)
    found = F.scaled_dot_product_attention(by_head(leaves[0]), by_head(k), by_head(v)).transpose(1, 2)
    (found * drawn(*found.shape, leaf=False)).float().sum().backward()
    return [found.float().numpy(), *(leaf.grad.float().numpy() for leaf in leaves)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (63, 80), (64, 77), (65, 8), (700, 77)])
def test_short_kv(length: int, keys: int, dtype: str) -> None:
    check(length, keys, dtype)


@pytest.mark.parametrize("keys", [41, 77])
@pytest.mark.parametrize("share", [1, 2, 3, 8])
def test_however_many_blocks_share_a_head(share: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_kv, "shares", lambda *_: share)
    with deterministic(False):
        check(700, keys, "bfloat16")


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warpgroups forward, however well cuDNN's tiles would be filled."""
    monkeypatch.setattr(wgmma, "SM_90", replace(SM_90, cudnn_forward=1e9, cudnn_forward_partial=1e9))


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("length", "keys"), [(1, 129), (64, 128), (65, 81), (193, 130), (300, 2129), (700, 2125), (1025, 1024)]
)
def test_warpgroups(length: int, keys: int, dtype: str) -> None:
    check(length, keys, dtype)


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("rise", [-0.02, 0.004, 0.02, 0.2])
def test_scores_that_rise_or_fall_from_key_to_key(rise: float) -> None:
    """By less than what is held against the largest so far, by more, and so much that most probabilities vanish."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (70, 2100, 2100))
    q, k = np.abs(q), k + rise * np.arange(2100)[:, None].astype(np.float32)
    want = F.scaled_dot_product_attention(*(flame.tensor(x, "float32", "cpu") for x in (q, k, v))).numpy()
    got = F.scaled_dot_product_attention(*(flame.tensor(x, "bfloat16", "cuda") for x in (q, k, v))).float().numpy()
    with use(scaled_dot_product_attention="reference"):
        plain = F.scaled_dot_product_attention(*(flame.tensor(x, "bfloat16", "cuda") for x in (q, k, v)))
    allowed = 2.0 * np.linalg.norm(plain.float().numpy() - want) + 2.0**-7 * np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= allowed


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    return flame.tensor(rng.standard_normal(shape).astype(np.float32), "bfloat16", "cuda")


def gradients_at(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[np.ndarray]:
    return [x.numpy() for x in flame.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g)]


def test_gradients_are_the_same_in_every_run() -> None:
    """Of more items than there are multiprocessors, so that blocks take several each."""
    rng = np.random.default_rng(0)
    leaves = [drawn(rng, 3, 20, n, 64) for n in (700, 1100, 1100, 700)]
    first = gradients_at(*(x.requires_grad_() for x in leaves[:3]), leaves[3])
    for _ in range(4):
        for a, b in zip(first, gradients_at(*leaves), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("preferred")
def test_one_head_for_a_whole_batch() -> None:
    """Keys and values that lie at no distance from each other."""
    rng = np.random.default_rng(0)
    q, g, k, v = (drawn(rng, n, 4, length, 64) for n, length in ((3, 300), (3, 300), (1, 200), (1, 200)))
    spread = [x.expand(3, 4, 200, 64).requires_grad_() for x in (k, v)]
    copied = [flame.tensor(x.numpy(), device="cuda", requires_grad=True) for x in spread]
    for a, b in zip(*(gradients_at(q.requires_grad_(), *kv, g) for kv in (spread, copied)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_in_two_parts_have_the_gradients_of_all_at_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fixed order of sums, by cuDNN."""
    rng, multiprocessors = np.random.default_rng(0), get_backend("cuda").kernels.multiprocessors
    heads = multiprocessors // 8 + 8  # of 8 tiles of keys: more than a round
    leaves = [drawn(rng, batch, heads, 1024, 128) for _ in range(4)]
    found = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(head_split, "SM_90", replace(SM_90, head_split_bytes=least))
        found.append(gradients_at(*(x.requires_grad_() for x in leaves[:3]), leaves[3].detach()))
    assert head_split.larger_part(batch, heads, 1024, 1024, 2, multiprocessors) < heads
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("head", [64, 128])
def test_one_query_and_one_key(head: int) -> None:
    """What cuDNN has no plan for: all probability is the key's."""
    rng = np.random.default_rng(0)
    q, k, v, g = (drawn(rng, 1, 2, 1, head) for _ in range(4))
    np.testing.assert_array_equal(F.scaled_dot_product_attention(q, k, v).numpy(), v.numpy())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = gradients_at(*leaves, g)
    np.testing.assert_array_equal(dv, g.numpy())
    for nothing in (dq, dk):
        np.testing.assert_allclose(nothing.astype(np.float32), 0.0, atol=1e-3)


def check(length: int, keys: int, dtype: str) -> None:
    truth = found_and_gradients(length, keys, dtype, "float32", "cpu")
    got = found_and_gradients(length, keys, dtype, dtype, "cuda")
    with use(scaled_dot_product_attention="reference"):
        plain = found_and_gradients(length, keys, dtype, dtype, "cuda")
    for t, g, p in zip(truth, got, plain, strict=True):
        allowed = 2.0 * np.linalg.norm(p - t) + float(ml_dtypes.finfo(as_dtype(dtype)).eps) * np.linalg.norm(t)
        assert np.linalg.norm(g - t) <= allowed
