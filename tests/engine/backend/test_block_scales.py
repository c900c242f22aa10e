"""Products of e4m3 scaled by blocks, on a stand-in for a card of compute capability 12 whose kernels run as C++.

None of this has run on such a card. What cuBLASLt reads is taken from its documentation (`stand_in.Products`).
"""

from __future__ import annotations

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.backend.cuda.block_scales import lacking
from flame_train.engine.backend.cuda.libraries.cublaslt import NoAlgorithm
from tests.engine.backend.stand_in import Products

pytestmark = pytest.mark.usefixtures("compiler")
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def card(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for an RTX 5090, with the kernels that these products want."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(gpu.kernels, "compute_capability", 120)
    monkeypatch.setattr(type(gpu.empty((1,), BF16)).device, "compute_capability", "120")
    k = gpu.kernels
    lacking(k.xp, k._by_blocks, k._from_sums)
    layer()
    compiled.build()
    k.__dict__.pop("scales_blocks", None)
    return gpu


def layer() -> tuple[np.ndarray, np.ndarray]:
    """The result of a layer and what it should be: 160 inputs are blocks of 32, in two tiles of scales."""
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((48, 160)) * np.geomspace(1, 1e3, 48)[:, None], rng.standard_normal((20, 160))
    data, scales = F.fp8_quantize(flame.tensor(weight.astype(np.float32)))
    on = flame.tensor(x, BF16, "cuda")
    y = F.scaled_linear(on, *(flame.tensor(p.numpy(), device="cuda") for p in (data, scales)), dynamic=True)
    want = F.scaled_linear(flame.tensor(on.numpy().astype(np.float64)), data, scales, dynamic=True)
    return y.numpy().astype(np.float64), want.numpy()


def check(made: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(made, want, rtol=2**-8, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (128, 128), (300, 416), (1000, 3072)])
def test_a_rows_factor_is_the_scale_of_all_its_blocks(card: Any, rows: int, columns: int) -> None:
    factors = np.ldexp(np.float32(1), np.random.default_rng(rows).integers(-100, 101, rows)).astype(np.float32)
    factors[1] = np.nan
    made = card.kernels.block_scales(flame.tensor(factors.view(np.uint32), device="cuda").data, columns).get()
    read = Products._by_blocks(made, (rows, columns))
    np.testing.assert_array_equal(read, np.repeat(factors[:, None], columns, 1))
    beyond = np.arange(rows, made.shape[0] * 128)
    assert (made[-1, :, beyond % 32 * 16 + beyond % 128 // 32 * 4] == 127).all()


def test_they_are_used_where_one_of_them_is_a_plain_product(card: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked, product = [], card.kernels.cublaslt.product

    def noticed(*args: Any, **more: Any) -> None:
        asked.append(more.get("blocks", False))
        product(*args, **more)

    card.kernels.cublaslt.product = noticed
    nn.Storage("fp8", dynamic=True).check("cuda", BF16)
    assert asked == [True, False]
    check(*layer())
    assert asked[2:] == [True]
    assert not caplog.records


def transposed(self: Products, *args: Any, scales: Any = None, blocks: bool = False, **more: Any) -> None:
    """As if the bytes of a tile lay otherwise."""
    turned = [s.reshape(*s.shape[:2], 128, 4).swapaxes(2, 3).reshape(s.shape) for s in scales] if blocks else scales
    Products.product(self, *args, scales=turned, blocks=blocks, **more)


def without(self: Products, *args: Any, blocks: bool = False, **more: Any) -> None:
    if blocks:
        raise NoAlgorithm("cuBLASLt has no algorithm for it")
    Products.product(self, *args, blocks=blocks, **more)


@pytest.mark.parametrize(
    ("other", "why"), [(transposed, "a product scaled by blocks differs from a plain one"), (without, "no algorithm")]
)
def test_plain_products_are_used_with_a_line_where_it_is_not(
    card: Any, other: Any, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.kernels.cublaslt, "product", other.__get__(card.kernels.cublaslt))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            nn.Storage("fp8", dynamic=True).check("cuda", BF16)
    (said,) = [r.getMessage() for r in caplog.records]
    assert why in said
    assert "plain ones are" in said
    check(*layer())
