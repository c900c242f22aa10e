"""Masks on their way to cuDNN: what is added to the scores, what of it is made, and what a blind row becomes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.described import workspace_bytes
from flame_train.engine.dtype import bfloat16
from flame_train.engine.mode import deterministic
from flame_train.engine.ops.attention import masks
from flame_train.errors import ShapeError

B, H, L, S = 2, 3, 5, 13
RNG = np.random.default_rng(0)


def on_gpu(values: Any, dtype: Any = None) -> Any:
    return flame.tensor(values, dtype, "cuda").data


CASES = {
    "keys": (RNG.random((B, 1, 1, S)) < 0.5, (B, 1, 1, S)),
    "pairs": (RNG.random((L, S)) < 0.5, (1, 1, L, S)),
    "heads": (RNG.random((H, 1, S)) < 0.5, (1, H, 1, S)),
    "queries": (RNG.random((B, 1, L, 1)) < 0.5, (B, 1, L, S)),
    "one for all": (np.array([[True]]), (1, 1, 1, S)),
    "a vector": (RNG.standard_normal(S), (1, 1, 1, S)),
    "numbers": (RNG.standard_normal((B, H, L, S)), (B, H, L, S)),
}


@pytest.fixture
def twice(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs what launches generated kernels once for their texts, and again when those are compiled."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)

    def run(fn: Callable[[], Any]) -> Any:
        fn()
        compiled.build()
        return fn()

    return run


@pytest.mark.slow
def test_what_is_added_to_the_scores(gpu: Any, twice: Any) -> None:
    """No more of it than differs, in rows of whole packets."""
    query, key = on_gpu(np.zeros((B, H, L, 8)), bfloat16), on_gpu(np.zeros((B, H, S, 8)), bfloat16)
    given = [on_gpu(values, None if values.dtype == bool else bfloat16) for values, _ in CASES.values()]
    added = twice(lambda: [masks.added(gpu.kernels, mask, query, key) for mask in given])
    for (name, (values, shape)), found in zip(CASES.items(), added, strict=True):
        assert found.shape == shape, name
        assert not any(distance % 16 for distance in found.strides[:3]), name
        want = np.where(values, 0.0, -np.inf) if values.dtype == bool else values.astype(bfloat16)
        got, want = (np.broadcast_to(a, (B, H, L, S)).astype(np.float64) for a in (found.get(), want))
        np.testing.assert_array_equal(got, want, name)


def test_a_mask_that_lies_as_cudnn_reads_it_is_not_copied(gpu: Any) -> None:
    query, key = (on_gpu(np.zeros((B, H, n, 8)), bfloat16) for n in (L, 16))
    mask = flame.tensor(np.zeros((B, 1, 1, 16)), bfloat16, "cuda")
    spread = mask.expand(B, H, L, 16).data
    found = masks.added(gpu.kernels, spread, query, key)
    assert found.data.ptr == mask.data.data.ptr
    assert found.shape == (B, 1, 1, 16)


@pytest.mark.slow
def test_a_row_that_sees_nothing(gpu: Any, twice: Any) -> None:
    found = np.array([1.5, -np.inf, -3e38, np.inf, 0.0], np.float32)
    lse = on_gpu(found)
    twice(lambda: masks.settle_blind_rows(gpu.kernels, lse))
    np.testing.assert_array_equal(lse.get(), [1.5, np.inf, np.float32(-3e38), np.inf, 0.0])


@pytest.mark.parametrize("mask", [np.ones((L, S + 1), bool), np.ones((B + 1, 1, 1, S), bool)], ids=["keys", "batch"])
def test_a_mask_that_does_not_fit_is_refused(gpu: Any, mask: Any) -> None:
    q, k = (flame.tensor(np.zeros((B, H, n, 8)), bfloat16, "cuda") for n in (L, S))
    with pytest.raises(ShapeError, match="attn_mask"):
        F.scaled_dot_product_attention(q, k, k, flame.tensor(mask, device="cuda"))


SEEN = [  # (batch, heads, key heads, queries, keys, head), MiB with the same bits every run, MiB else: of an H100
    ((1, 24, 24, 4608, 4608, 128), 972, 54),
    ((1, 48, 12, 4608, 4608, 128), 2052, 216),
    ((1, 30, 30, 4608, 4608, 128), 1215, 67),
    ((8, 32, 8, 512, 512, 128), 192, 128),
    ((4, 10, 10, 4096, 4096, 64), 1280, 40),
    ((1, 8, 8, 4096, 4096, 256), 256, 32),
    ((2, 4, 2, 130, 4097, 128), 28, 16),
]


@pytest.mark.parametrize(("sizes", "exact", "any_order"), SEEN, ids=str)
def test_what_gradients_work_in_is_what_a_card_took(sizes: tuple[int, ...], exact: int, any_order: int) -> None:
    """To a MiB, and less than a thousandth more."""
    batch, heads, key_heads, queries, keys, width = sizes

    def array(count: int, length: int) -> Any:
        size = batch * count * length * width
        return SimpleNamespace(shape=(batch, count, length, width), size=size, nbytes=2 * size, itemsize=2)

    arrays = {"q": array(heads, queries), "k": array(key_heads, keys), "v": array(key_heads, keys)}
    for kept, want in ((True, exact), (False, any_order)):
        with deterministic(kept):
            found = workspace_bytes("sdpa_backward", bfloat16, arrays) / 2**20
        assert want - 1 <= found <= want + 1 + want / 1000


def test_a_gradient_of_the_mask_writes_all_scores_down_in_either_mode() -> None:
    q = SimpleNamespace(shape=(1, 24, 1024, 128), size=24 * 1024 * 128, nbytes=24 * 1024 * 256, itemsize=2)
    with deterministic(False):
        assert workspace_bytes("sdpa_backward", bfloat16, {"q": q, "k": q, "v": q, "db": q}) == 48 << 20  # an H100's
