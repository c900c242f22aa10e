"""Weights of 4 bits: each number to the nearest that its block has; what a block has, by NF4's definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def parts_of(weight: np.ndarray) -> list[np.ndarray]:
    return [part.numpy() for part in F.nf4_quantize(flame.tensor(weight))]


def back(weight: np.ndarray) -> np.ndarray:
    return F.nf4_dequantize(*F.nf4_quantize(flame.tensor(weight)), weight.shape, "float64").numpy()


def magnitudes(weight: np.ndarray) -> np.ndarray:
    """What the numbers of each block are multiplied by: seen where the block's code is 1 or -1."""
    rows = np.abs(back(weight)).reshape(-1, 64)
    return rows.max(1)


def test_every_number_is_the_nearest_of_its_block() -> None:
    """Brute force over the 16 numbers of QLoRA's table, with the block's exact magnitude as the quantizer has it."""
    weight = normal(48, 128)
    codes = parts_of(weight)[0]
    both = np.stack([codes >> 4, codes & 15], 1).reshape(-1, 64)
    table = np.sort(np.unique(np.round(back(weight).reshape(-1, 64) / magnitudes(weight)[:, None], 5)))
    assert len(table) == 16
    scaled = weight.reshape(-1, 64) / np.abs(weight.reshape(-1, 64)).max(1, keepdims=True)
    distance = np.abs(scaled[..., None] - table)
    near = np.take_along_axis(distance, both[..., None].astype(np.int64), -1)[..., 0]
    assert (near <= distance.min(-1) + 2e-5).all(), "the table is known to 5 digits here"


def test_quantiles_of_the_normal_distribution() -> None:
    """QLoRA, section 3: -1 to 1 with 0 exactly, eight steps below it and seven above, denser in the middle."""
    weight = normal(256, 256)
    table = np.sort(np.unique(np.round(back(weight).reshape(-1, 64) / magnitudes(weight)[:, None], 5)))
    assert (table[0], table[7], table[-1]) == (-1, 0, 1)
    steps = np.diff(table)
    assert (np.diff(steps[:6]) < 0).all()
    assert (np.diff(steps[8:]) > 0).all()


def test_magnitudes_are_kept_to_a_part_in_the_spread_of_256() -> None:
    weight = normal(512, 64) * np.exp(normal(512, 1) / 4)
    largest = np.abs(weight).max(1)
    spread = np.abs(largest - largest.mean()).reshape(-1, 256).max(1)
    assert (np.abs(magnitudes(weight) - largest) <= np.repeat(spread, 256) * 0.00704).all(), "half of the map's step"


def test_a_weight_takes_four_and_an_eighth_bits() -> None:
    layer = nn.Linear(3072, 64, bias=False)
    layer.init(np.random.default_rng(0))
    layer.quantize(nn.Storage("nf4"))
    assert isinstance(layer.weight, nn.Nf4Weight)
    assert 8 * layer.weight.nbytes / (3072 * 64) == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3)
    assert layer.weight.shape == (64, 3072)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 65)])
def test_blocks_that_are_not_whole(shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    assert np.abs(back(weight) - weight).max() < 0.2 * np.abs(weight).max()


def test_a_row_of_zeros_is_given_back() -> None:
    weight = normal(4, 64)
    weight[2] = 0
    assert np.abs(back(weight)[2]).max() == 0


def test_a_layer_decodes_its_weight_for_its_gradient_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass decode once each; between them no array of the weight's size is alive."""
    layer, seen = nn.Linear(64, 96), list[Any]()
    layer.init(np.random.default_rng(0))
    layer.quantize(nn.Storage("nf4"))
    decode = F.nf4_dequantize
    monkeypatch.setattr(F, "nf4_dequantize", lambda *a: seen.append(a[-1]) or decode(*a))
    x = flame.tensor(normal(3, 64), requires_grad=True)
    y = layer(x)
    assert len(seen) == 1
    assert all(array.size != 64 * 96 for array in y._node.saved_arrays)
    y.sum().backward()
    assert len(seen) == 2
    weight = decode(*layer.weight.stored, layer.weight.shape, "float32").numpy()
    np.testing.assert_allclose(x.grad.numpy(), np.tile(weight.sum(0), (3, 1)), rtol=1e-5, atol=1e-6)


def test_there_are_no_products_in_4_bits() -> None:
    with pytest.raises(ValueError, match="no products in nf4"):
        nn.Storage("nf4", dynamic=True)
