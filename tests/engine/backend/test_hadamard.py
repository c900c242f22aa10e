"""LoHa's four gradients of one layer: two products of two, added in place to the flat buffer of an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F

OUT, WIDTH, RANK = 70, 132, 5
SHAPES = (OUT, RANK), (RANK, WIDTH), (OUT, RANK), (RANK, WIDTH)


def gradients(device: str, values: list[np.ndarray], frozen: int | None = None) -> list[np.ndarray]:
    """Of a sum that uses the weight twice, so that the second gradient meets the first."""
    weight, *matrices = values
    leaves = [flame.tensor(m, device=device, requires_grad=True) for m in matrices]
    flame.optim.FlatParameters([leaf for i, leaf in enumerate(leaves) if i != frozen])
    given = [leaf.detach() if i == frozen else leaf for i, leaf in enumerate(leaves)]
    base = flame.tensor(weight, device=device)
    total = sum(F.hadamard_add(base, *given, scale).square().sum() for scale in (0.5, -0.25))
    total.backward()  # type: ignore[union-attr]
    return [leaf.grad.numpy() for i, leaf in enumerate(leaves) if i != frozen and leaf.grad is not None]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
def test_gradients_are_added_to_those_of_an_optimizer(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype(np.float32) for s in ((OUT, WIDTH), *SHAPES)]
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
