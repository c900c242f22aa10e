"""Attention with dropout on tensor cores in bf16 and fp16, with masks, grouped heads, causal, and heads of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, bfloat16, float16
from flame_train.engine.mode import deterministic
from flame_train.engine.random import Rng
from tests.engine.backend.dropped import Case, call, check, check_what_falls

pytestmark = pytest.mark.gpu

CASES = [
    *(
        Case(sizes, (head, head), mask, causal, p=0.1)
        for mask in ("", "keys", "pairs", "added", "added to keys", "lengths")
        for causal in (False, True)
        for sizes, head in (((2, 6, 2, 333, 131), 128), ((3, 4, 4, 200, 257), 64))
    ),
    Case((2, 3, 3, 1025, 1024)),
    Case((1, 2, 1, 700, 2125), (128, 128), causal=True),
    Case((2, 2, 2, 77, 77), (80, 104), "pairs"),
    Case((1, 2, 2, 1, 2), (40, 64)),
    Case((1, 1, 1, 20, 1), (64, 8), p=0.9),
    Case((2, 8, 2, 130, 70), (128, 64), "keys", p=0.5),
]


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case: Case, dtype: DType) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 8, 2, 700, 64), (1, 2, 1, 200, 51)], ids=str)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5])
def test_the_same_probabilities_fall(sizes: Any, head: int, p: float, dtype: DType) -> None:
    check_what_falls(Case(sizes, (head, head), p=p), dtype)


def made(given: list[Any], how: dict[str, Any], g: Tensor) -> list[Tensor]:
    out = F.scaled_dot_product_attention(*given, **how)
    return [out, *flame.grad(out, given[:3], g)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_the_same_in_every_run_and_captured(case: Case, exact: bool) -> None:
    kept: list[Tensor] = []
    arguments = call(case, bfloat16, bfloat16, "cuda")

    def step() -> None:
        kept[:] = made(*arguments)

    with deterministic(exact):
        first, second = ([x.numpy() for x in made(*arguments)] for _ in range(2))
        captured = flame.capture(step, "cuda")
        for _ in range(3):  # tried, captured, replayed
            captured()
    for a, b, c in zip(first, second, kept, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c.numpy())


def test_many_heads_are_the_same_in_every_run() -> None:
    """Of more blocks than a GPU holds at once."""
    arguments = call(Case((3, 20, 10, 700, 1100), causal=True), bfloat16, bfloat16, "cuda")
    first = [x.numpy() for x in made(*arguments)]
    for _ in range(4):
        for a, b in zip(first, made(*arguments), strict=True):
            np.testing.assert_array_equal(a, b.numpy())


def test_a_sample_alone_gets_the_same() -> None:
    case = Case((3, 4, 2, 130, 200))
    (q, k, v, *rest), how, g = call(case, bfloat16, bfloat16, "cuda")
    whole = [x.numpy() for x in made([q, k, v, *rest], how, g)]
    rng = how["rng"]
    for i in range(3):
        own = slice(i, i + 1)
        alone = how | {"rng": Rng(rng.xp, rng.seed, rng.step, rng.samples[own])}
        leaves = [flame.tensor(x.numpy()[own], bfloat16, "cuda", requires_grad=True) for x in (q, k, v)]
        for a, b in zip(made([*leaves, *rest], alone, g[own]), whole, strict=True):
            np.testing.assert_array_equal(a.numpy(), b[own])


def test_a_captured_step_draws_new_numbers() -> None:
    """Those of its number, which lies on the device."""
    backend = get_backend("cuda")
    given, how, g = call(Case((2, 2, 2, 64, 64)), bfloat16, bfloat16, "cuda")
    at = backend.references.zeros((), np.int64)
    rng = how["rng"]
    moving = how | {"rng": Rng(rng.xp, rng.seed, at, rng.samples)}
    kept: list[Tensor] = []

    def step() -> None:
        kept[:] = made(given, moving, g)

    captured = flame.capture(step, "cuda")
    for number in range(4):
        at[...] = number
        captured()
        fixed = how | {"rng": Rng(rng.xp, rng.seed, number, rng.samples)}
        for a, b in zip(kept, made(given, fixed, g), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_padding_is_not_read() -> None:
    """Numbers that are none change nothing."""
    found = []
    for filling in (0.0, np.nan):
        (q, k, v, *rest), how, g = call(Case((3, 4, 2, 130, 200), mask="lengths"), bfloat16, bfloat16, "cuda")
        ends = how["key_value_seq_lengths"].numpy()[:, None, None, None]
        padding = np.arange(200)[:, None] >= ends
        filled = [np.where(padding, filling, x.float().numpy()) for x in (k, v)]
        k, v = (flame.tensor(x, bfloat16, "cuda", requires_grad=True) for x in filled)
        found.append([x.numpy() for x in made([q, k, v, *rest], how, g)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    for x in found[0][2:]:
        assert not x[np.broadcast_to(padding, (*x.shape[:3], 1))[..., 0]].any()


@pytest.mark.parametrize("causal", [False, True])
def test_barred_keys_whose_scores_are_infinite_change_nothing(causal: bool) -> None:
    """And a sample that sees no key has no gradients."""
    queries, keys, rng = 300, 270, np.random.default_rng(3)
    seen = rng.random((2, 1, 1, keys)) < 0.5
    seen[1] = False
    k = rng.standard_normal((2, 4, keys, 64)) * np.where(seen, 1.0, 1e38).swapaxes(2, 3)
    given = [rng.standard_normal((2, 4, queries, 64)), k, rng.standard_normal((2, 4, keys, 64))]
    leaves = [flame.tensor(x, "bfloat16", "cuda", requires_grad=True) for x in given]
    mask, g = (
        flame.tensor(seen, device="cuda"),
        flame.tensor(rng.standard_normal((2, 4, queries, 64)), bfloat16, "cuda"),
    )
    backend = get_backend("cuda").references
    chance = Rng(backend, 5, 6, backend.arange(2))
    found = [x.float().numpy() for x in made([*leaves, mask, 0.2, causal], {"rng": chance}, g)]
    for x in found:
        assert np.isfinite(x).all()
        assert not x[1].any()
        assert x[0].any()
    for x in found[2:]:
        assert not x[np.broadcast_to(~seen[:, :, 0], x.shape[:3])].any()
