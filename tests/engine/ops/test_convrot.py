"""Layers in int8 with a rotation, against explicit matrices of scipy's Hadamard matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.io.convrot import group_of
from tests.engine.ops.test_scaled import by_whole_numbers


def rotation(width: int, group: int) -> np.ndarray:
    """The block-diagonal matrix. The regular matrix of 4 rows is scipy's with the signs of rows and columns changed.

    The last row and the last column change, and two of the rows places: (-1)^(ab + cd) by the bits ab and cd of both.
    """
    signs = np.diag([1, 1, 1, -1])
    four = signs @ scipy.linalg.hadamard(4)[[0, 2, 1, 3]] @ signs / 2
    made = np.ones((1, 1))
    while len(made) < group:
        made = np.kron(made, four)
    return np.kron(np.eye(width // group), made)


def test_the_matrix_is_regular_symmetric_and_its_own_inverse() -> None:
    turn = rotation(256, 256)
    np.testing.assert_array_equal(turn @ turn, np.eye(256))
    np.testing.assert_array_equal(turn, turn.T)
    assert set(turn.sum(0)) == {1.0}
    assert [group_of(n) for n in (3072, 640, 48, 24)] == [256, 64, 16, 0]


@pytest.mark.parametrize(("width", "group"), [(48, 16), (320, 64), (512, 256)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_multiply_what_is_rotated_and_rounded(width: int, group: int, dynamic: bool) -> None:
    """Output and input gradient, in fp64, of a plain layer and of two with a LoRA."""
    rng, turn = np.random.default_rng(width), rotation(width, group)
    x, g = rng.standard_normal((7, width)), rng.standard_normal((7, 12))
    w = rng.standard_normal((12, width)).astype(np.float32)
    down, up = rng.standard_normal((4, width)), rng.standard_normal((12, 4))
    data, scales = F.int8_quantize(flame.tensor(w), group)
    by = scales.numpy().view(np.float32).astype(np.float64)
    codes = data.numpy().astype(np.float64)
    assert np.abs(codes * by[:, None] - w @ turn).max() <= 0.5001 * by.max()
    leaf = flame.tensor(x, requires_grad=True)
    plain = F.scaled_linear(leaf, data, scales, dynamic=dynamic, rotated=group)
    factors = [[flame.tensor(v, requires_grad=True)] for v in (down, up)]
    (adapted,) = F.scaled_lora_linears(leaf, [data], [scales], *factors, 0.5, dynamic=dynamic, rotated=group)
    seen = by_whole_numbers(x @ turn) if dynamic else x @ turn
    want = seen @ (codes * by[:, None]).T
    grad = (by_whole_numbers(g * by) if dynamic else g * by) @ codes @ turn
    low = x @ down.T * 0.5
    np.testing.assert_allclose(plain.numpy(), want, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(adapted.numpy(), want + low @ up.T, rtol=1e-11, atol=1e-11)
    for made, wanted in ((plain, grad), (adapted, grad + g @ up @ down * 0.5)):
        (got,) = flame.grad([made], [leaf], [flame.tensor(g)])
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-11, atol=1e-11)
    back = F.scaled_dequantize(data, scales, "float64", group).numpy()
    np.testing.assert_allclose(back, codes * by[:, None] @ turn, rtol=1e-11, atol=1e-11)


def error(x: np.ndarray, w: np.ndarray, group: int) -> float:
    """Of a product of int8, in per cent of the exact one's norm."""
    stored: Any = F.int8_quantize(flame.tensor(w), group)
    got = F.scaled_linear(flame.tensor(x), *stored, dynamic=True, rotated=group).numpy()
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    return float(100 * np.linalg.norm(got - exact) / np.linalg.norm(exact))


def test_few_large_columns_cost_the_others_nothing() -> None:
    """Products of normal numbers err alike; where eight columns are ten times as large, by half as much."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 1024)).astype(np.float32) for n in (256, 512))
    plain = [error(x, w, group) for group in (0, 256)]
    assert all(1.1 < e < 1.3 for e in plain), plain
    large = np.ones(1024, np.float32)
    large[rng.choice(1024, 8, replace=False)] = 10
    without, rotated = (error(x * large, w, group) for group in (0, 256))
    assert without > 1.8
    assert rotated <= 1.4
    weights, turned = (error(x, w * large, group) for group in (0, 256))
    assert weights > 1.8
    assert turned <= 1.4


def test_a_layer_is_stored_by_the_largest_group_that_divides_its_width() -> None:
    for width, group in ((512, 256), (320, 64), (24, 0)):
        layer = nn.Linear(width, 8, bias=False)
        layer.init(np.random.default_rng(0))
        exact = layer.weight.numpy()
        layer.quantize(nn.Storage("int8-convrot", dynamic=True))
        assert isinstance(layer.weight, nn.ScaledWeight)
        assert (layer.weight.rotated, layer.weight.dynamic) == (group, True)
        back = layer.weight.dequantize(np.dtype(np.float32)).numpy()
        assert np.linalg.norm(back - exact) < 0.012 * np.linalg.norm(exact)
