"""Attention of pictures to captions, its operands lying as networks have them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import use

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
    truth = found_and_gradients(length, keys, dtype, "float32", "cpu")
    got = found_and_gradients(length, keys, dtype, dtype, "cuda")
    with use(scaled_dot_product_attention="reference"):
        plain = found_and_gradients(length, keys, dtype, dtype, "cuda")
    for t, g, p in zip(truth, got, plain, strict=True):
        allowed = 2.0 * np.linalg.norm(p - t) + float(ml_dtypes.finfo(as_dtype(dtype)).eps) * np.linalg.norm(t)
        assert np.linalg.norm(g - t) <= allowed
