"""Products of 8 bits on the stand-in GPU: what cuBLASLt is asked for, and what is done where it has no algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.backend.cuda import products
from flame_train.engine.backend.cuda.libraries.cublaslt import NoAlgorithm
from flame_train.engine.backend.cuda.tuning import SM_90
from flame_train.engine.dispatch import explain
from flame_train.engine.op import REGISTRY
from flame_train.engine.ops.fused import feed_forward
from flame_train.errors import ConfigError, EnvironmentFault

BF16 = np.dtype(ml_dtypes.bfloat16)


def operands(rows: int = 6, quantize: Any = F.fp8_quantize) -> list[flame.Tensor]:
    rng = np.random.default_rng(0)
    data, scales = quantize(flame.tensor(rng.standard_normal((32, 48), np.float32)))
    x, bias = (flame.tensor(rng.standard_normal(s), BF16, "cuda") for s in ((rows, 48), (32,)))
    return [x, flame.tensor(data.numpy(), device="cuda"), flame.tensor(scales.numpy(), device="cuda"), bias]


@pytest.fixture
def asked(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every product of 8 bits that is asked for, whether with a bias: those have no algorithm."""
    seen: list[bool] = []
    product = gpu.kernels.cublaslt.product

    def few(*args: Any, bias: Any = None, scales: Any = None, **more: Any) -> None:
        if scales is not None:
            seen.append(bias is not None)
            if bias is not None:
                raise NoAlgorithm("none")
        product(*args, bias=bias, scales=scales, **more)

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", few)
    return seen


def test_a_bias_that_no_algorithm_takes_along_is_asked_for_once(gpu: Any, asked: list[bool]) -> None:
    for _ in range(2):
        F.scaled_linear(*operands(), dynamic=True)
    assert asked == [True, False, False]
    F.scaled_linear(*operands(7), dynamic=True)
    assert asked == [True, False, False, True, False]


@pytest.mark.parametrize("few", [False, True], ids=["bias taken along", "bias apart"])
def test_a_loras_update_is_added_with_and_without_a_bias(
    gpu: Any, few: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last product is the thin one, (rows, rank) by (rank, out), onto the layer's result."""
    if few:
        request.getfixturevalue("asked")
    found, product = [], gpu.kernels.cublaslt.product

    def noticed(a: Any, b: Any, out: Any, **more: Any) -> None:
        product(a, b, out, **more)
        found.append((a.shape[-2:], b.shape[-2:], more.get("plus") is not None))

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", noticed)
    x, data, scales, bias = operands()
    down, up = (flame.tensor(np.ones(s), BF16, "cuda") for s in ((16, 48), (32, 16)))
    for own in (None, bias):
        F.scaled_lora_linears(x, [data], [scales], [down], [up], 0.5, own, dynamic=True)
        assert found[1:] == [((6, 48), (48, 32), False), ((6, 16), (16, 32), True)], own
        found.clear()


@pytest.mark.parametrize("lies", ["dense", "turned", "with gaps"])
def test_a_residual_is_added_as_it_lies(gpu: Any, lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, added = operands(), []
    product = gpu.kernels.cublaslt.product
    room = gpu.empty((32, 6), BF16).T if lies == "turned" else gpu.empty((6, 35 if lies == "with gaps" else 32), BF16)
    residual = flame.Tensor(room[:, :32])
    residual.data[...] = np.arange(192).reshape(6, 32)

    def noticed(*args: Any, plus: Any = None, **more: Any) -> None:
        added.append(plus)
        product(*args, plus=plus, **more)

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", noticed)
    F.scaled_linear(*given, residual, dynamic=True)
    assert [p.strides for p in added] == [(64, 2)], "cuBLASLt is told the distance of rows alone"


def test_without_a_bias_there_is_no_other_way(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **more: Any) -> None:
        raise NoAlgorithm("cuBLASLt has no algorithm")

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", none)
    with pytest.raises(NoAlgorithm, match="no algorithm"):
        F.scaled_linear(*operands()[:3], dynamic=True)


CARDS = [("89", "reference"), ("90", "scaled"), ("100", "reference"), ("120", "scaled")]


@pytest.mark.parametrize(("capability", "chosen"), CARDS)
def test_a_factor_a_row_needs_one_of_two_cards(
    gpu: Any, capability: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands()
    monkeypatch.setattr(type(given[0].data).device, "compute_capability", capability)
    monkeypatch.setattr(gpu.kernels, "compute_capability", int(capability))
    found = explain(REGISTRY["scaled_linear"], *given, dynamic=True)
    assert [impl for impl, why in found if why == "chosen"] == [chosen]
    dynamic = nn.Storage("fp8", dynamic=True)
    nn.Storage("fp8").check("cuda", "fp32")
    dynamic.check("cpu", "fp32")
    if chosen == "scaled":
        dynamic.check("cuda", "fp16")
        with pytest.raises(ConfigError, match=r'need precision "bf16" or "fp16", got "float32"'):
            dynamic.check("cuda", "fp32")
        return
    with pytest.raises(EnvironmentFault, match=rf"found {capability[:-1]}\.{capability[-1]}; use model"):
        dynamic.check("cuda", BF16)


@pytest.mark.parametrize(("capability", "chosen"), [("75", "reference"), ("80", "scaled"), ("120", "scaled")])
def test_products_of_whole_numbers_are_amperes_and_laters(
    gpu: Any, capability: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(quantize=F.int8_quantize)
    monkeypatch.setattr(type(given[0].data).device, "compute_capability", capability)
    monkeypatch.setattr(gpu.kernels, "compute_capability", int(capability))
    found = explain(REGISTRY["scaled_linear"], *given, dynamic=True)
    assert [impl for impl, why in found if why == "chosen"] == [chosen]
    dynamic = nn.Storage("int8", dynamic=True)
    if chosen == "scaled":
        return dynamic.check("cuda", BF16)
    with pytest.raises(EnvironmentFault, match=r"8\.0 or later, such as A100 and RTX 3090, found 7\.5; use model"):
        dynamic.check("cuda", BF16)


def test_sums_in_int32_lie_in_memory_by_parts_of_the_rows(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SUMS_BYTES", 1)
    monkeypatch.setattr(products, "_ROWS_OF_SUMS", 16)
    asked, product = list[tuple[int, ...]](), gpu.kernels.cublaslt.product

    def noticed(a: Any, b: Any, out: Any, **more: Any) -> None:
        asked.append(out.shape)
        assert not more
        assert out.dtype == np.int32
        product(a, b, out)
        np.testing.assert_array_equal(out.get(), a.get().astype(np.int32) @ b.get().astype(np.int32))

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", noticed)
    given = operands(37, F.int8_quantize)
    F.scaled_linear(*given, flame.tensor(np.ones((37, 32)), BF16, "cuda"), dynamic=True)
    assert asked == [(16, 32), (16, 32), (5, 32)]


def test_joined_weights_of_8_bits_are_read_where_they_lie(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(48, 32, bias=False) for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.init(np.random.default_rng(i), device="cuda")
        layer.quantize(nn.Storage("fp8"))
    weights = nn.ScaledWeight.joined([layer.weight for layer in layers])
    for layer, joined in zip(layers, weights, strict=True):
        np.testing.assert_array_equal(joined.data.numpy(), layer.weight.data.numpy())
        np.testing.assert_array_equal(joined.scales.numpy(), layer.weight.scales.numpy())
    for part in ("data", "scales"):
        assert gpu.kernels.as_stacked_view([getattr(w, part).data for w in weights]) is not None


@pytest.mark.parametrize(
    ("quantize", "dynamic"), [(F.fp8_quantize, False), (F.fp8_quantize, True), (F.int8_quantize, True)]
)
def test_a_feed_forward_network_is_two_products_each_way(
    gpu: Any, quantize: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the GELU in them, or in what encodes their rows; what a kernel makes is for tests/gpu."""
    monkeypatch.setattr(feed_forward, "tuning_of", lambda _: replace(SM_90, gelu_epilogue_elements=1))
    rng, asked = np.random.default_rng(0), []
    product = gpu.kernels.cublaslt.product

    def noticed(*args: Any, gelu: Any = None, scales: Any = None, **more: Any) -> None:
        asked.append((gelu is not None, args[0].itemsize == 1))
        product(*args, **more, **({} if gelu is scales is None else {"gelu": gelu, "scales": scales}))

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", noticed)
    first, second = (
        quantize(flame.tensor(rng.standard_normal(shape), "float32", "cuda")) for shape in ((64, 32), (48, 64))
    )
    x, bias = (
        flame.tensor(rng.standard_normal(s), BF16, "cuda", requires_grad=s == (2, 3, 32)) for s in ((2, 3, 32), (64,))
    )
    y = F.scaled_feed_forward(x, *first, bias, *second, dynamic=dynamic)
    assert (y.shape, y.dtype) == ((2, 3, 48), BF16)
    assert asked == [(not dynamic, dynamic), (False, dynamic)]
    (g,) = flame.grad([y], [x], [flame.tensor(np.ones(y.shape), BF16, "cuda")])
    assert (g.shape, g.dtype) == (x.shape, BF16)
    assert asked[2:] == [(not dynamic, dynamic), (False, dynamic)]


@pytest.mark.parametrize(("shape", "chosen"), [((16, 1 << 16), "scaled"), ((16, (1 << 16) + 16), "reference")])
def test_rows_longer_than_what_lies_ready_for_them_are_left(gpu: Any, shape: tuple[int, int], chosen: str) -> None:
    data, scales = gpu.empty(shape, np.dtype(np.uint8)), gpu.empty(shape[:1], np.dtype(np.uint32))
    x = flame.tensor(np.zeros((2, shape[1])), BF16, "cuda")
    found = explain(REGISTRY["scaled_linear"], x, flame.Tensor(data), flame.Tensor(scales), dynamic=True)
    assert [impl for impl, why in found if why == "chosen"] == [chosen]
    assert len(gpu.kernels.ones) >= 1 << 16
    encoder = [impl for impl, why in explain(REGISTRY["fp8_quantize"], x) if why == "chosen"]
    assert encoder == ["flame" if chosen == "scaled" else "reference"]
