"""nn.MultiheadAttention: with and without weights it computes one thing, whatever the layout and the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import nn
from flame_train.engine.random import Rng
from flame_train.errors import ShapeError

E, H, B, L, S = 8, 2, 3, 4, 5
RNG = np.random.default_rng(0)
MASKS: list[dict[str, Any]] = [
    {},
    {"attn_mask": np.triu(np.ones((L, S), bool), 2)},
    {"attn_mask": RNG.standard_normal((B * H, L, S))},
    {"key_padding_mask": np.arange(S) >= np.array([[5], [3], [4]])},
    {"key_padding_mask": np.arange(S) >= np.array([[5], [3], [4]]), "attn_mask": np.triu(np.ones((L, S), bool), 2)},
    {"is_causal": True},
]


def made(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(E, H, **options)
    layer.init(np.random.default_rng(1), "float64")
    return layer


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 7, "bias": False}])
def test_weights_are_those_that_were_used(masks: dict[str, Any], options: dict[str, Any]) -> None:
    layer = made(**options)
    q, k, v = (
        flame.tensor(RNG.standard_normal(s))
        for s in ((L, B, E), (S, B, options.get("kdim", E)), (S, B, options.get("vdim", E)))
    )
    call = {n: flame.tensor(m) if isinstance(m, np.ndarray) else m for n, m in masks.items()}
    y, weights = layer(q, k, v, average_attn_weights=False, **call)
    assert weights.shape == (B, H, L, S)
    np.testing.assert_allclose(weights.numpy().sum(-1), 1.0, rtol=1e-12)
    alone, none = layer(q, k, v, need_weights=False, **call)
    assert none is None
    np.testing.assert_allclose(alone.numpy(), y.numpy(), rtol=1e-10, atol=1e-12)
    mean = layer(q, k, v, **call)[1]
    np.testing.assert_allclose(mean.numpy(), weights.numpy().mean(1), rtol=1e-12)


def test_layouts_agree() -> None:
    second, first = made(), made(batch_first=True)
    x = RNG.standard_normal((L, B, E))
    y = second(*[flame.tensor(x)] * 3)[0].numpy()
    z = first(*[flame.tensor(x.transpose(1, 0, 2))] * 3)[0].numpy()
    np.testing.assert_allclose(z.transpose(1, 0, 2), y, rtol=1e-12)
    one, weights = second(*[flame.tensor(x[:, 1])] * 3)
    np.testing.assert_allclose(one.numpy(), y[:, 1], rtol=1e-12)
    assert weights.shape == (L, L)


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ShapeError, match="8 channels do not divide into 3 heads"):
        nn.MultiheadAttention(8, 3)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        nn.MultiheadAttention(8, 2, 1.5)


@pytest.mark.parametrize("masks", MASKS)
def test_dropout_takes_the_same_weights_with_and_without_showing_them(masks: dict[str, Any]) -> None:
    layer = made(dropout=0.4)
    q, k, v = (flame.tensor(RNG.standard_normal((n, B, E))) for n in (L, S, S))
    call = {n: flame.tensor(m) if isinstance(m, np.ndarray) else m for n, m in masks.items()}
    rng = Rng(np, 1, 2, np.arange(B))
    y, weights = layer(q, k, v, average_attn_weights=False, rng=rng, **call)
    alone, _ = layer(q, k, v, need_weights=False, rng=rng, **call)
    np.testing.assert_allclose(alone.numpy(), y.numpy(), rtol=1e-10, atol=1e-12)
    whole = layer(q, k, v, average_attn_weights=False, training=False, **call)[1].numpy()
    dropped = weights.numpy()
    assert 0 < np.mean(dropped[whole > 0] == 0) < 1
    np.testing.assert_allclose(dropped[dropped > 0], whole[dropped > 0] / 0.6, rtol=1e-12)
