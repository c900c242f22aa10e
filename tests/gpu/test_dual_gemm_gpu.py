"""Two products and their sum in one pass, against the same in fp32 by cuBLASLt: every tile, every edge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import capture
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.cuda import dual_gemm
from flame_train.engine.backend.cuda.dual_gemm import Operands
from flame_train.engine.dtype import DType, bfloat16, float16, float32
from flame_train.engine.mode import deterministic

pytestmark = pytest.mark.gpu

CASES = {
    "a whole number of tiles": (1024, 1280, 640, 16, 1),
    "edges everywhere": (1000, 1928, 200, 32, 1),
    "less than a tile": (136, 104, 72, 64, 1),
    "layers of one input": (520, 2304, 320, 16, 3),  # parts that every tile's columns divide
    "a wide rank": (300, 768, 1288, 48, 1),
}


@pytest.fixture
def kernels() -> Any:
    backend = get_backend("cuda")
    if backend.kernels.compute_capability != 90:
        pytest.skip("the kernel is for compute capability 9.0")
    backend.stream.use()
    return backend.kernels


def spread(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def numbers(shape: tuple[int, ...], seed: int, dtype: DType) -> Any:
    return flame.tensor(spread(shape, seed), dtype, "cuda").data


def operands(
    case: str, across: bool, dtype: DType, *, bias: bool = False, plus: bool = False, making: bool = False
) -> Operands:
    """With a result whose rows lie further apart than they are long, and 7 between them; so with a2 if that is made."""
    m, n, k, rank, parts = CASES[case]
    a, a2 = numbers((m, k), 0, dtype), numbers((m, rank * parts), 1, dtype)
    b, b2 = (numbers((k, n), 2, dtype), numbers((rank, n), 3, dtype))
    if not across:
        b, b2 = (np.ascontiguousarray(x.get().T) for x in (b, b2))
        b, b2 = (flame.tensor(x, dtype, "cuda").data.T for x in (b, b2))
    room = flame.tensor(np.full((m, n + 64), 7.0), dtype, "cuda").data
    extra = numbers((n,), 4, dtype) if bias else None, numbers((m, n), 5, dtype) if plus else None
    if not making:
        return Operands(a, b, a2, b2, room[:, :n], parts, *extra)
    thin = numbers((k, rank * parts), 6, dtype)
    thin = thin if across else flame.tensor(np.ascontiguousarray(thin.get().T), dtype, "cuda").data.T
    low = flame.tensor(np.full((m, rank * parts + 8), 7.0), dtype, "cuda").data[:, : rank * parts]
    return Operands(a, b, low, b2, room[:, :n], parts, *extra, thin=thin, scale=0.25)


def expected(k: Any, x: Operands) -> np.ndarray[Any, Any]:
    """In fp32, rounded nowhere."""
    a, b, a2, b2 = (y.astype(float32) for y in (x.a, x.b, x.a2, x.b2))
    y = k.matmul(a, b).get()
    rank, part = len(b2), y.shape[1] // x.parts
    for i in range(x.parts):
        columns = slice(i * part, (i + 1) * part)
        y[:, columns] += k.matmul(a2[:, i * rank : (i + 1) * rank], b2[:, columns]).get()
    for extra in (x.bias, x.plus):
        y += 0 if extra is None else extra.get().astype(np.float32)
    return y


def check(k: Any, x: Operands) -> None:
    want, unit = expected(k, x), 2.0 ** (-8 if x.out.dtype == bfloat16 else -11)
    found = x.out.get().astype(np.float32)
    # One rounding of the result, and the order of sums of fp32 over numbers about 1.
    np.testing.assert_allclose(found, want, rtol=unit, atol=2e-5 * np.sqrt(x.a.shape[1]))
    assert (x.out.base[:, x.out.shape[1] :].get() == 7).all()


@pytest.mark.parametrize("tile", dual_gemm.TILES, ids=str)
@pytest.mark.parametrize("across", [False, True], ids=["transposed", "across"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_every_tile_gives_the_sum_of_both_products(
    kernels: Any, case: str, dtype: DType, across: bool, tile: dual_gemm.Tile
) -> None:
    x = operands(case, across, dtype)
    kernels.dual_gemms.run(tile, x)
    check(kernels, x)


@pytest.mark.parametrize("tile", dual_gemm.MAKING, ids=str)
@pytest.mark.parametrize("across", [False, True], ids=["transposed", "across"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_the_thin_product_is_made_in_passing(
    kernels: Any, case: str, dtype: DType, across: bool, tile: dual_gemm.Tile
) -> None:
    _, _, k, rank, parts = CASES[case]
    x = operands(case, across, dtype, bias=True, making=True)
    kernels.dual_gemms.run(replace(tile, thin=rank), x)
    want = 0.25 * kernels.matmul(x.a.astype(float32), x.thin.astype(float32)).get()
    unit = 2.0 ** (-8 if dtype == bfloat16 else -11)
    np.testing.assert_allclose(x.a2.get().astype(np.float32), want, rtol=unit, atol=1e-5 * np.sqrt(k))
    assert (x.a2.base[:, rank * parts :].get() == 7).all()
    check(kernels, x)


@pytest.mark.parametrize("tile", dual_gemm.MAKING, ids=str)
@pytest.mark.parametrize(("splits", "rank"), [(2, 16), (3, 16), (2, 32), (4, 16)])
def test_thin_products_of_parts_of_the_columns(kernels: Any, splits: int, rank: int, tile: dual_gemm.Tile) -> None:
    """As gradients of layers of one input are."""
    m, n, each = 1000, 1928, 192
    shapes = [(m, splits * each), (splits * each, n), (splits * each, rank), (splits * rank, n)]
    a, b, thin, b2 = (numbers(shape, i, bfloat16) for i, shape in enumerate(shapes))
    low, out = (flame.tensor(np.full(s, 7.0), bfloat16, "cuda").data for s in ((m, splits * rank), (m, n + 8)))
    x = Operands(a, b, low, b2, out[:, :n], plus=numbers((m, n), 5, bfloat16), thin=thin, scale=0.25, splits=splits)
    assert x.fit()
    kernels.dual_gemms.run(replace(tile, thin=rank), x)
    whole = [y.astype(float32).reshape(splits, -1, y.shape[1]) for y in (thin, a.T)]
    want = [0.25 * kernels.matmul(part.T, own).get() for own, part in zip(*whole, strict=True)]
    np.testing.assert_allclose(low.get().astype(np.float32), np.hstack(want), rtol=2.0**-8, atol=2e-4)
    check(kernels, x)


@pytest.mark.parametrize("tile", dual_gemm.TILES, ids=str)
@pytest.mark.parametrize(("bias", "plus"), [(True, False), (False, True), (True, True)])
def test_a_bias_and_what_is_there_are_added(kernels: Any, tile: dual_gemm.Tile, bias: bool, plus: bool) -> None:
    x = operands("edges everywhere", False, bfloat16, bias=bias, plus=plus)
    kernels.dual_gemms.run(tile, x)
    check(kernels, x)


@pytest.mark.parametrize("tile", dual_gemm.TILES, ids=str)
def test_the_result_may_be_what_it_is_added_to(kernels: Any, tile: dual_gemm.Tile) -> None:
    x = operands("edges everywhere", True, bfloat16, plus=True)
    x.out[...] = x.plus
    kernels.dual_gemms.run(tile, Operands(x.a, x.b, x.a2, x.b2, x.out, plus=x.out))
    check(kernels, x)


def layer(exact: bool) -> list[np.ndarray[Any, Any]]:
    """A layer with a LoRA, large enough to be asked about, and its gradients."""
    shapes = {"x": (2048, 640), "w": (1280, 640), "b": (1280,), "down": (16, 640), "up": (1280, 16)}
    with deterministic(exact):
        t = {
            name: flame.tensor(spread(shape, i) * (0.05 if i else 1), "bfloat16", "cuda", requires_grad=True)
            for i, (name, shape) in enumerate(shapes.items())
        }
        y = F.lora_linear(t["x"], t["w"], t["b"], t["down"], t["up"], 0.5)
        g = flame.tensor(spread(y.shape, 9), "bfloat16", "cuda")
        return [y.float().numpy(), *(v.float().numpy() for v in flame.grad(y, list(t.values()), g))]


@pytest.mark.parametrize("exact", [True, False], ids=["by rule", "measured"])
def test_a_layer_gives_the_same_as_two_products(kernels: Any, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.dual_gemms, "_chosen", {})
    found = layer(exact)
    assert not exact or any(kernels.dual_gemms._chosen.values())
    again = layer(exact)
    monkeypatch.setattr(kernels.dual_gemms, "_here", False)
    for one, other, apart in zip(found, again, layer(exact), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, apart, rtol=2**-6, atol=2**-7 * np.abs(apart).max())


def test_captured_layers_give_the_bits_of_eager_ones(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.dual_gemms, "_chosen", {})
    shapes = [(2048, 640), (1280, 640), (1280,), (16, 640), (1280, 16)]
    tensors = [flame.tensor(spread(shape, i), "bfloat16", "cuda") for i, shape in enumerate(shapes)]
    made = flame.tensor(np.zeros((2048, 1280)), "bfloat16", "cuda")

    def forward() -> None:
        made.data[...] = F.lora_linear(*tensors, 0.5).data

    with deterministic(True):
        forward()
        assert any(kernels.dual_gemms._chosen.values())
        once = made.float().numpy()
        replay = capture(forward, "cuda")
        for _ in range(3):
            made.data.fill(0)
            replay()
            np.testing.assert_array_equal(made.float().numpy(), once)
