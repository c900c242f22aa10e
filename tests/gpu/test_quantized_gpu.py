"""Bases stored in fewer bits on a GPU: gradients of the CPU's, and int8 products that are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.cuda.dual_gemm import Operands
from flame_train.engine.backend.cuda.dual_gemm_tiles import TILES, fits
from flame_train.io.convrot import hadamard
from flame_train.tools import bench
from flame_train.training.step import micro

pytestmark = pytest.mark.gpu

KINDS = [(0, False), (16, False), (16, True), (64, False), (32, True)]
"""Of the thin product, rows of b2, and whether it is row-major."""

MODELS = ["sdxl-tiny", "sd3-tiny", "flux-tiny"]


def prepared(model: str, device: str, quantize: Any, arithmetic: Any, precision: Any = "fp32") -> bench.Prepared:
    """Before a first step, whose weights and batches are drawn alike everywhere."""
    stored = {"quantize": quantize, "arithmetic": arithmetic}
    return bench.prepare(bench.BenchCase(model, 128, batch=2, rank=16, precision=precision, device=device, **stored))


def gradients_of(p: bench.Prepared) -> np.ndarray:
    """All adapters' gradients of the step."""
    micro(p.state, p.batch)
    return p.backend.to_host(p.state.optimizer.arena.grads).astype(np.float64)


def gradients(*case: Any) -> np.ndarray:
    return gradients_of(prepared(*case))


def take_codes(of: bench.Prepared, to: bench.Prepared) -> None:
    """Gives `to` the rotated weights that `of` stores, which differ in few codes, by one.

    A rotation's sums in fp32 are made in another order on each device. By it a number of 127 steps moves by about
    127 * 2^-24 * sqrt(256), twice which is the share of numbers that lie as near to the middle of two codes.
    """
    pairs = [
        (mine, its)
        for (_, mine), (_, its) in zip(of.network.weights(), to.network.weights(), strict=True)
        if isinstance(mine, nn.ScaledWeight)
    ]
    apart = np.concatenate([np.abs(a.data.numpy().astype(int) - b.data.numpy()).ravel() for a, b in pairs])
    assert apart.max() <= 1
    assert apart.mean() < 2 * 127 * 2**-24 * 256**0.5
    for mine, its in pairs:
        for part, own in zip(mine.stored, its.stored, strict=True):
            own.data[...] = to.backend.to_device(part.numpy())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quantize", ["fp8", "int8", "int8-convrot", "nf4"])
def test_stored_weights_give_the_gradients_of_the_cpu(model: str, quantize: str) -> None:
    here, there = (prepared(model, device, quantize, "bf16") for device in ("cpu", "cuda"))
    if quantize == "int8-convrot":
        take_codes(here, there)
    truth, got = gradients_of(here), gradients_of(there)
    assert np.linalg.norm(got - truth) < 1e-4 * np.linalg.norm(truth)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quantize", ["fp8", "int8", "int8-convrot"])
def test_products_of_8_bits_give_the_gradients_of_the_cpu_but_for_rounding(model: str, quantize: str) -> None:
    """Rows differ in the last bit of bf16 before they are rounded to 8, so some fall to the other side."""
    stored = quantize.partition("-")[0]
    exact = gradients(model, "cpu", quantize, "bf16")
    truth, got = (gradients(model, device, quantize, stored, "bf16") for device in ("cpu", "cuda"))
    assert np.linalg.norm(got - exact) < 1.5 * np.linalg.norm(truth - exact)
    assert got @ exact > 0.95 * np.linalg.norm(got) * np.linalg.norm(exact)


@pytest.mark.parametrize(("rows", "out", "width"), [(4608, 3072, 3072), (77, 640, 2048), (1000, 12288, 3072)])
def test_products_of_int8_are_exact(rows: int, out: int, width: int) -> None:
    """Before the factors are applied: so fp32 results have the bits of whole sums that are made on the host."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, (n, width)).astype(np.int8) for n in (rows, out))
    k, one = get_backend("cuda").kernels, np.float32(1).view(np.uint32)
    on = [flame.tensor(a, device="cuda").data for a in (x, np.full(rows, one), w, np.full(out, one))]
    made = k.empty((rows, out), np.dtype(np.float32))
    k.scaled_product((on[0], on[1]), (on[2], on[3]), out=made)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_array_equal(get_backend("cuda").to_host(made), want.astype(np.float32))


PRODUCTS = [
    *((m, n, k, rank, across, 0) for m, n, k in ((1024, 1280, 640), (4608, 3072, 3072)) for rank, across in KINDS),
    *((m, n, k, rank, across, 256) for m, n, k in ((1000, 1280, 2560), (4608, 3072, 3072)) for rank, across in KINDS),
    *((4096, 640, 640, rank, across, group) for rank, across in KINDS for group in (16, 64)),
]


@pytest.mark.parametrize(("m", "n", "k", "rank", "across", "group"), PRODUCTS)
@pytest.mark.parametrize("adds", [False, True])
def test_a_product_of_int8_with_its_lora_is_what_both_are(
    m: int, n: int, k: int, rank: int, across: bool, group: int, adds: bool
) -> None:
    """By every tile, and by sums in memory: factors, rotation, the thin product, and what is added, in fp64."""
    rng, on = np.random.default_rng(m + n), get_backend("cuda")
    kernels, xp = on.kernels, on.kernels.xp
    rows, columns = (xp.asarray(rng.integers(-127, 128, (r, k)).astype(np.int8)) for r in (m, n))
    by, over = (xp.asarray(rng.uniform(1e-4, 2e-4, r).astype(np.float32)) for r in (m, n))
    hidden, up, plus, bias = (
        flame.tensor(rng.standard_normal(s), "bfloat16", "cuda").data for s in ((m, 64), (64, n), (m, n), (n,))
    )
    low = hidden[:, :rank], up[:rank] if across else xp.ascontiguousarray(up[:rank].T).T
    exact = xp.matmul(rows.astype(np.float64), columns.astype(np.float64).T) * by[:, None]
    if group:
        exact = (exact.reshape(m, -1, group) @ xp.asarray(hadamard(group), np.float64)).reshape(m, n)
    else:
        exact *= over
    exact += hidden[:, :rank].astype(np.float64) @ up[:rank].astype(np.float64)
    exact += (plus.astype(np.float64) + (0 if group else bias.astype(np.float64))) if adds else 0
    a2, b2 = low if rank else (None, None)
    factors = by, None if group else over
    found = {}
    for tile in [None, *TILES]:
        if tile is not None and not fits(tile, n, 1, group):
            continue
        out = plus.copy()
        added, beside = (out if adds else None), (bias if adds and not group else None)
        x = Operands(rows, columns.T, a2, b2, out, 1, beside, added, factors=factors, rotated=group)
        assert x.fit()
        kernels._from_sums(x) if tile is None else kernels.dual_gemms.run(tile, x)
        found[tile and (tile.consumers, tile.columns)] = float(
            xp.linalg.norm(out.astype(np.float64) - exact) / xp.linalg.norm(exact)
        )
    assert all(error < 0.004 for error in found.values()), found


def test_a_rotation_and_rounding_are_the_hosts() -> None:
    """Codes of rotated rows, but for those that lie between two."""
    rng = np.random.default_rng(3)
    for n, width, group in ((4608, 3072, 256), (1000, 15360, 256), (4096, 640, 64), (77, 48, 16), (300, 320, 64)):
        x = rng.standard_normal((n, width)).astype(np.float32)
        (data, scales), (got, factors) = (
            F.int8_quantize(flame.tensor(x, "bfloat16", device), group) for device in ("cpu", "cuda")
        )
        apart = np.abs(data.numpy().astype(int) - got.numpy())
        assert apart.max() <= 1
        assert (apart > 0).mean() < 2e-3
        np.testing.assert_allclose(factors.numpy().view(np.float32), scales.numpy().view(np.float32), rtol=1e-5)
        back = [F.scaled_dequantize(data.to(d), scales.to(d), "float32", group).numpy() for d in ("cpu", "cuda")]
        np.testing.assert_allclose(back[1], back[0], rtol=0, atol=1e-5)


def test_4_bits_have_the_bits_of_the_cpu() -> None:
    weight = np.random.default_rng(1).standard_normal((3072, 1024)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        found = []
        for device in ("cpu", "cuda"):
            parts = F.nf4_quantize(flame.tensor(weight, device=device))
            back = F.nf4_dequantize(*parts, weight.shape, dtype)
            found.append([part.numpy() for part in (*parts, back)])
        for want, got in zip(*found, strict=True):
            np.testing.assert_array_equal(got, want)
