"""Attention to captions, and to keys that fill no tile, its operands lying as networks have them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import deterministic, use
from flame_train.engine.ops import attention_few_keys

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
def test_few_keys(length: int, keys: int, dtype: str) -> None:
    check(length, keys, dtype)


@pytest.mark.parametrize("keys", [41, 77, 2048 + 77])
@pytest.mark.parametrize("share", attention_few_keys._SHARES)
def test_however_many_blocks_share_a_head(share: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_few_keys, "_SHARES", (share,))
    with deterministic(False):
        check(700, keys, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("length", "keys"), [(1, 2049), (700, 2125), (65, 2128), (300, 2129)])
@pytest.mark.parametrize("exact", [True, False])
def test_the_last_of_many_keys(length: int, keys: int, dtype: str, exact: bool) -> None:
    with deterministic(exact):
        check(length, keys, dtype)


@pytest.mark.parametrize(("ahead", "behind"), [(30.0, 0.0), (0.0, 30.0)])
def test_what_the_last_keys_outweigh_or_are_outweighed_by(ahead: float, behind: float) -> None:
    """Scores that differ by hundreds between the two parts, so that one's probabilities vanish."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (70, 2100, 2100))
    q, k = np.abs(q), k + np.where(np.arange(2100) < 2048, ahead, behind)[:, None].astype(np.float32)
    want = F.scaled_dot_product_attention(*(flame.tensor(x, "float32", "cpu") for x in (q, k, v))).numpy()
    got = F.scaled_dot_product_attention(*(flame.tensor(x, "bfloat16", "cuda") for x in (q, k, v))).float().numpy()
    with use(scaled_dot_product_attention="reference"):
        plain = F.scaled_dot_product_attention(*(flame.tensor(x, "bfloat16", "cuda") for x in (q, k, v)))
    allowed = 2.0 * np.linalg.norm(plain.float().numpy() - want) + 2.0**-7 * np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= allowed


def check(length: int, keys: int, dtype: str) -> None:
    truth = found_and_gradients(length, keys, dtype, "float32", "cpu")
    got = found_and_gradients(length, keys, dtype, dtype, "cuda")
    with use(scaled_dot_product_attention="reference"):
        plain = found_and_gradients(length, keys, dtype, dtype, "cuda")
    for t, g, p in zip(truth, got, plain, strict=True):
        allowed = 2.0 * np.linalg.norm(p - t) + float(ml_dtypes.finfo(as_dtype(dtype)).eps) * np.linalg.norm(t)
        assert np.linalg.norm(g - t) <= allowed
