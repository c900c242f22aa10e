"""Attention's dropout: which probabilities fall depends on their place alone, and how many on the probability."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.ops.attention import attention
from flame_train.engine.random import Rng

B, H, L, S, E = 3, 2, 7, 10, 4
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, H, n, E)) for n in (L, S, S))


def rng(samples: object = None) -> Rng:
    return Rng(np, 5, 6, np.arange(B) if samples is None else np.asarray(samples))


def attended(q: np.ndarray = Q, k: np.ndarray = K, v: np.ndarray = V, **how: object) -> np.ndarray:
    how = {"dropout_p": 0.3, "rng": rng(), **how}
    return F.scaled_dot_product_attention(*(flame.tensor(a) for a in (q, k, v)), **how).numpy()


def shown() -> np.ndarray:
    """The dropped probabilities themselves, as what the rows of an identity are weighted by."""
    return attended(v=np.broadcast_to(np.eye(S), (B, H, S, S)).copy())


def test_what_is_left_is_scaled() -> None:
    whole = attended(v=np.broadcast_to(np.eye(S), (B, H, S, S)).copy(), dropout_p=0.0)
    kept = shown() / whole
    np.testing.assert_allclose(kept[kept > 0], 1 / 0.7, rtol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_it_drops_its_share_everywhere(p: float) -> None:
    """In every row, column and head alike: no share is further off than six standard deviations."""
    n = 400
    q, k = np.zeros((2, 2, n, 1)), np.zeros((2, 2, n, 1))
    v = np.broadcast_to(np.eye(n), (2, 2, n, n)).copy()
    fell = attended(q, k, v, dropout_p=p, rng=rng([0, 1])) == 0.0
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):
        share = fell.mean(axis=axes)
        count = fell.size / share.size
        assert np.abs(share - p).max() < 6 * np.sqrt(p * (1 - p) / count)
    assert not np.array_equal(fell[0], fell[1])
    assert not np.array_equal(fell[:, 0], fell[:, 1])


def test_it_is_the_dropout_of_rows_padded_to_whole_blocks() -> None:
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(E)
    p = np.exp(scores)
    p = np.pad(p / p.sum(-1, keepdims=True), [(0, 0)] * 3 + [(0, -S % 4)])
    want = F.dropout(flame.tensor(p), 0.3, rng=rng()).numpy()[..., :S] @ V
    np.testing.assert_allclose(attended(), want, rtol=1e-10, atol=1e-12)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither values nor gradients: what the backward pass draws again is what the forward pass drew."""

    def run() -> list[np.ndarray]:
        leaves = [flame.tensor(a, requires_grad=True) for a in (Q, K, V)]
        y = F.scaled_dot_product_attention(*leaves, dropout_p=0.3, is_causal=True, rng=rng())
        return [y.numpy(), *(g.numpy() for g in flame.grad((y * y).sum(), leaves))]

    whole = run()
    monkeypatch.setattr(attention, "_BLOCK_BYTES", 2 * B * H * S * 64)  # two rows at a time
    for a, b in zip(run(), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_sample_alone_gets_the_same() -> None:
    np.testing.assert_allclose(attended(Q[1:2], K[1:2], V[1:2], rng=rng([1])), attended()[1:2], rtol=1e-12)


def test_a_step_a_seed_and_a_stream_of_its_own() -> None:
    others = [Rng(np, 5, 7, np.arange(B)), Rng(np, 4, 6, np.arange(B))]
    drawn = [attended(), *(attended(rng=r) for r in others), attended(stream=30)]
    assert len({a.tobytes() for a in drawn}) == 4


def test_all_may_fall() -> None:
    np.testing.assert_array_equal(attended(dropout_p=1.0), np.zeros_like(Q))
