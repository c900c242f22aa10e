"""LoHa's four gradients of one layer: added in place to the flat buffer of an optimizer, and made by tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.shapes.driver import RTX_3090, T4
from flame_train.engine.dtype import DType, bfloat16, float16, float32, float64

OUT, WIDTH, RANK = 70, 132, 5
SHAPES = (OUT, RANK), (RANK, WIDTH), (OUT, RANK), (RANK, WIDTH)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the first run computes with what memory holds
]


def gradients(
    device: str, values: list[np.ndarray], frozen: int | None = None, dtype: DType = float32
) -> list[np.ndarray]:
    """Of a sum that uses the weight twice, so that the second gradient meets the first."""
    weight, *matrices = values
    leaves = [flame.Parameter(flame.tensor(m, device=device).data, f"{i}") for i, m in enumerate(matrices)]
    arena = flame.optim.FlatParameters([p for i, p in enumerate(leaves) if i != frozen], compute_dtype=dtype)
    arena.sync_copies()
    given = [
        flame.tensor(p.data.astype(dtype), dtype, device) if i == frozen else p.compute_copy
        for i, p in enumerate(leaves)
    ]
    base = flame.tensor(weight, dtype, device)
    total = sum(F.hadamard_add(base, *given, scale).float().square().sum() for scale in (0.5, -0.25))
    total.backward()  # type: ignore[union-attr]
    return [leaf.grad.numpy() for i, leaf in enumerate(leaves) if i != frozen and leaf.grad is not None]


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def distance(got: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - truth) / np.linalg.norm(truth))


def test_gradients_are_added_to_those_of_an_optimizer(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn((OUT, WIDTH), *SHAPES)
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    gradients("cuda", values)
    compiled.build()
    products, matmul = list[bool](), gpu.kernels.matmul

    def noting(*args: Any, **options: Any) -> Any:
        products.append(options.get("out") is not None)
        return matmul(*args, **options)

    monkeypatch.setattr(gpu.kernels, "matmul", noting)
    for frozen in (None, 0):
        products.clear()
        found, wanted = gradients("cuda", values, frozen), gradients("cpu", values, frozen)
        assert len(found) == len(wanted) == (4 if frozen is None else 3)
        for f, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-5, atol=1e-5 * np.abs(w).max())
        assert products == ([True] * 4 if frozen is None else [False, True] * 2)


def test_so_they_are_in_16_bits(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, without a product of a library."""
    values = [v.astype(bfloat16).astype(np.float32) for v in drawn((OUT, WIDTH), *SHAPES)]
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(gpu.kernels, "matmul", None)
    gradients("cuda", values, dtype=bfloat16)
    compiled.build()
    for frozen in (None, 0, 3):
        found, plain, truth = (
            gradients(*how, frozen=frozen, dtype=kind)
            for how, kind in ((("cuda", values), bfloat16), (("cpu", values), bfloat16), (("cpu", values), float32))
        )
        for f, p, t in zip(found, plain, truth, strict=True):
            assert distance(f, t) <= 1.5 * distance(p, t)


CASES = [(67, 264, 16), (130, 72, 8), (35, 136, 24), (33, 131, 16), (20, 75, 7), (330, 200, 64), (37, 150, 80)]
"""Rows, width and rank: with and without packets and pairs, tiles not full, the products' gradients in memory."""


@pytest.mark.parametrize("multiprocessors", [132, 1], ids=["many parts", "few"])
def test_products_of_warps(gpu: Any, compiled: Any, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(gpu.kernels, "multiprocessors", multiprocessors)

    def found(case: tuple[int, int, int], device: str, kind: DType) -> list[np.ndarray]:
        rows, width, rank = case
        shapes = (rows, width), *((rows, rank), (rank, width)) * 2, (rows, width)
        *given, g = (flame.tensor(v.astype(bfloat16), kind, device, requires_grad=True) for v in drawn(*shapes))
        made = F.hadamard_add(*given, 0.5)
        return [t.numpy() for t in (made, *flame.grad(made, given[1:], g.detach()))]

    for case in CASES:
        found(case, "cuda", bfloat16)
    compiled.build()
    for case in CASES:
        got, again, plain, truth = (
            found(case, *how) for how in (("cuda", bfloat16), ("cuda", bfloat16), ("cpu", bfloat16), ("cpu", float64))
        )
        for name, g, a, p, t in zip(("out", "a1", "b1", "a2", "b2"), got, again, plain, truth, strict=True):
            assert distance(g, t) <= 1.5 * distance(p, t), (case, name)  # which rounds a gradient once, not twice
            np.testing.assert_array_equal(g, a)


@pytest.mark.parametrize(
    ("card", "files"), [(T4, {"hadamard.cuh"}), (RTX_3090, {"hadamard_mma.cuh"})], ids=["T4", "RTX 3090"]
)
def test_older_cards(gpu: Any, files: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = set[str](), gpu.kernels.launch_header
    monkeypatch.setattr(gpu.kernels, "launch_header", lambda *a: launched.add(a[0].rpartition("/")[2]) or launch(*a))
    given = [flame.tensor(v, float16, "cuda", requires_grad=True) for v in drawn((OUT, WIDTH), *SHAPES)]
    made = F.hadamard_add(*given, 0.5)
    flame.grad(made, given[1:], made.detach())
    assert launched == files
