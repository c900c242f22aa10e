"""The GELU between two products, in the epilogues of cuBLASLt's, for weights that are frozen."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.tuning import SM_90
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import as_dtype
from flame_train.engine.op import REGISTRY
from flame_train.engine.ops.fused import feed_forward

pytestmark = pytest.mark.gpu


def found_and_gradient(sizes: tuple[int, ...], bias: bool, rounded: str, dtype: str, device: str) -> list[np.ndarray]:
    """What is found for two inputs, of which the gradients are added up."""
    *rows, width, hidden, out = sizes
    rng = np.random.default_rng(hidden)

    def drawn(*shape: int, by: float = 1.0) -> flame.Tensor:
        return flame.tensor((by * rng.standard_normal(shape)).astype(as_dtype(rounded)), dtype, device)

    x = drawn(*rows, width).requires_grad_()
    first, second = drawn(hidden, width, by=width**-0.5), drawn(out, hidden, by=hidden**-0.5)
    biases = (drawn(hidden), drawn(out)) if bias else (None, None)
    y = F.feed_forward(x, first, biases[0], second, biases[1])
    ((y * drawn(*y.shape)).float().sum() + (x * drawn(*x.shape)).float().sum()).backward()
    return [y.float().numpy(), x.grad.float().numpy()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "bias"), [((3, 50, 64, 256, 40), True), ((77, 72, 264, 64), False)])
def test_as_its_parts(sizes: tuple[int, ...], bias: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = found_and_gradient(sizes, bias, dtype, "float32", "cpu")
    plain = found_and_gradient(sizes, bias, dtype, dtype, "cuda")
    monkeypatch.setattr(feed_forward, "tuning_of", lambda _: replace(SM_90, gelu_epilogue_elements=0))
    got = found_and_gradient(sizes, bias, dtype, dtype, "cuda")
    for t, g, p in zip(truth, got, plain, strict=True):
        allowed = 2.0 * np.linalg.norm(p - t) + float(ml_dtypes.finfo(as_dtype(dtype)).eps) * np.linalg.norm(t)
        assert np.linalg.norm(g - t) <= allowed


def test_small_ones_go_part_by_part() -> None:
    few, many = (
        [flame.tensor(np.zeros(s), "bfloat16", "cuda") for s in ((n, 64), (8192, 64), (8192,), (64, 8192))]
        for n in (2047, 2048)
    )
    verdicts = [dict(explain(REGISTRY["feed_forward"], *x))["cublaslt"] for x in (few, many)]
    assert verdicts[1] == "chosen"
    assert verdicts[0].startswith("16769024 values")
