"""Kernels that are written out, their values included, without a GPU: see machine.cpp and ptx.cpp for how.

Truth is fp64 on the rounded inputs. The rule is that of tests/gpu: at most twice the error of the reference in the
tested dtype plus one ulp.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda import dual_gemm
from flame_train.engine.backend.cuda.dual_gemm import Operands, Tile
from flame_train.engine.dtype import Array, DType, bfloat16, float16, float32, float64
from flame_train.engine.ops.attention import short_kv, wgmma
from flame_train.engine.ops.attention.operands import Inputs, Saved
from flame_train.engine.ops.linear import skinny_gemm
from flame_train.engine.ops.linear.skinny_gemm import SkinnyOperands
from tests.engine.ops.test_convrot import rotation

pytestmark = pytest.mark.proof

Values = np.ndarray[Any, Any]


def rounded(shape: tuple[int, ...], seed: int, dtype: DType) -> Values:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def distance(got: Values, truth: Values) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - truth) / np.linalg.norm(truth))


def rows_sums(query: Array, key: Array, scale: float) -> Values:
    """The log-sum-exp of each query's scores under a causal mask, in fp64."""
    q, k = (np.asarray(x.get(), np.float64) for x in (query, key))
    scores = np.where(np.tri(q.shape[2], k.shape[2]) > 0, q @ k.swapaxes(2, 3) * scale, -np.inf)
    found: Values = np.logaddexp.reduce(scores, axis=-1)
    return found


def attend(case: tuple[int, ...], drawn: DType, dtype: DType, device: str, causal: bool = False) -> dict[str, Values]:
    """The output and gradients, of heads that lie beside each other as projections leave them."""
    batch, heads, length, keys = case
    given = [rounded((batch, n, heads, 64), i, drawn) for i, n in enumerate((length, keys, keys, length))]
    q, k, v, g = (flame.tensor(x, dtype, device, requires_grad=True).transpose(1, 2) for x in given)
    made = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    parts = zip(("out", "query", "key", "value"), (made, *flame.grad(made, (q, k, v), g.detach())), strict=True)
    return {name: np.asarray(x.numpy(), np.float64) for name, x in parts}


def check_attention(case: tuple[int, ...], dtype: DType) -> None:
    got, plain, truth = (attend(case, dtype, *how) for how in ((dtype, "cuda"), (dtype, "cpu"), (float64, "cpu")))
    for name, t in truth.items():
        assert distance(got[name], t) <= 2 * distance(plain[name], t) + float(ml_dtypes.finfo(dtype).eps), name


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("case", [(2, 2, 200, 77), (1, 3, 40, 2), (1, 1, 448, 80)], ids=str)
def test_attention_to_a_caption(computing: Any, case: tuple[int, ...], dtype: DType) -> None:
    check_attention(case, dtype)


def test_attention_to_a_caption_by_few_blocks(computing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which go through more tiles than they have places for, one after another."""
    monkeypatch.setattr(computing.kernels, "multiprocessors", 1)
    check_attention((1, 4, 700, 77), bfloat16)


@pytest.mark.parametrize("case", [(2, 2, 200, 200), (1, 3, 70, 333), (1, 2, 256, 128), (1, 2, 130, 700)], ids=str)
@pytest.mark.parametrize("multiprocessors", [132, 2], ids=["an item a block", "several"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_warpgroups(
    computing: Any, case: tuple[int, ...], multiprocessors: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward without a causal mask alone: with one it is cuDNN's."""
    monkeypatch.setattr(computing.kernels, "multiprocessors", multiprocessors)
    k, (batch, heads, length, keys), scale = computing.kernels, case, 0.125
    q, key, value, g = (
        flame.tensor(rounded((batch, n, heads, 64), i, bfloat16), bfloat16, "cuda").data.transpose(0, 2, 1, 3)
        for i, n in enumerate((length, keys, keys, length))
    )
    out, lse = k.empty(q.shape, bfloat16), k.empty(q.shape[:3], float32)
    into = tuple(k.empty(x.shape, bfloat16) for x in (q, key, value))
    plain, truth = (attend(case, bfloat16, dtype, "cpu", causal) for dtype in (bfloat16, float64))
    if causal:
        out[...], lse[...] = truth["out"].astype(bfloat16), rows_sums(q, key, scale)
    else:
        wgmma.forward(k, q, key, value, out, lse, scale)
    inputs = Inputs(q, key, value, None, causal, scale, False, None)
    wgmma.gradients(k, g, inputs, Saved(out, lse), into)
    for (name, t), got in zip(truth.items(), (out, *into), strict=True):
        assert distance(got.get(), t) <= 2 * distance(plain[name], t) + float(ml_dtypes.finfo(bfloat16).eps), name


@pytest.mark.parametrize("multiprocessors", [132, 2], ids=["an item a block", "several"])
@pytest.mark.parametrize(("causal", "each"), [(False, True), (True, True), (False, False)])
def test_gradients_by_warpgroups_where_keys_are_barred(
    computing: Any, multiprocessors: int, causal: bool, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each sample its own or of all the same; a sample sees nothing, and what is barred would be infinite."""
    monkeypatch.setattr(computing.kernels, "multiprocessors", multiprocessors)
    batch, heads, length, keys, scale = 3, 2, 130, 200, 0.125
    seen = np.random.default_rng(9).random((batch if each else 1, 1, 1, keys)) < 0.6
    seen[..., -80:] = False  # a whole tile of keys
    seen[-1] &= not each
    drawn = [rounded((batch, heads, n, 64), i, bfloat16) for i, n in enumerate((length, keys, keys, length))]
    drawn[1][np.broadcast_to(~seen[:, :, 0, :], drawn[1].shape[:3])] *= bfloat16.type(300)
    found = {}
    for kind in (bfloat16, float64):
        q, key, value, g = (flame.tensor(x, kind, requires_grad=True) for x in drawn)
        made = F.scaled_dot_product_attention(q, key, value, flame.tensor(seen), is_causal=causal)
        found[kind] = made, *flame.grad(made, (q, key, value), g.detach())
    q64, k64 = (x.astype(np.float64) for x in drawn[:2])
    looks = np.broadcast_to(seen & (np.tri(length, keys) > 0) if causal else seen, (batch, heads, length, keys))
    scores = np.where(looks, q64 @ k64.swapaxes(2, 3) * scale, -np.inf)
    lse = np.where(looks.any(-1), np.logaddexp.reduce(scores, axis=-1), np.inf)
    k, tiles = computing.kernels, -(-keys // 64) * 64
    bars = np.full((len(seen), tiles), np.nan, np.float32)
    bars[:, :keys] = np.where(seen[:, 0, 0], 0.0, -np.inf)
    monkeypatch.setattr(wgmma, "_bars", lambda *_: flame.tensor(bars, device="cuda").data)
    q, key, value, g = (flame.tensor(x, device="cuda").data for x in drawn)
    out, into = flame.tensor(found[float64][0].numpy().astype(bfloat16), device="cuda").data, (q, key, value)
    into = tuple(k.empty(x.shape, bfloat16) for x in into)
    inputs = Inputs(q, key, value, flame.tensor(seen, device="cuda").data, causal, scale, False, None)
    wgmma.gradients(k, g, inputs, Saved(out, flame.tensor(lse, float32, "cuda").data), into)
    for got, plain, truth in zip(into, found[bfloat16][1:], found[float64][1:], strict=True):
        t = truth.numpy()
        assert distance(got.get(), t) <= 2 * distance(plain.numpy(), t) + float(ml_dtypes.finfo(bfloat16).eps)
    for got in into[1:]:
        assert not got.get()[np.broadcast_to(~seen[:, :, 0, :], got.shape[:3])].any()


@pytest.mark.parametrize(
    ("rows", "width", "out", "layers", "rank"),
    [(600, 72, 136, 3, 16), (520, 640, 8, 1, 64), (1000, 200, 320, 2, 32)],
)
@pytest.mark.parametrize("held", [False, True], ids=["assigned", "added to"])
@pytest.mark.parametrize("multiprocessors", [132, 1], ids=["shared", "by one block"])
def test_gradients_of_lora_factors(
    computing: Any,
    rows: int,
    width: int,
    out: int,
    layers: int,
    rank: int,
    held: bool,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing.kernels, "multiprocessors", multiprocessors)
    k, shapes = computing.kernels, ((rows, width), (rows, layers, out), (rows, layers * rank), (rows, layers * rank))
    x, g, inner, low = (rounded(shape, i, bfloat16) for i, shape in enumerate(shapes))
    t = SkinnyOperands(*(flame.tensor(a, bfloat16, "cuda").data for a in (x, g, inner, low)), rank)
    before = {n: rounded(t.shape(n), 7, float32) if held else np.zeros(t.shape(n)) for n in ("down", "up")}
    targets = {n: flame.tensor(b, float32, "cuda").data if held else None for n, b in before.items()}
    assert skinny_gemm.fit(k, t)
    made = skinny_gemm.both(k, t, targets, deferrable=False)
    x, g, inner, low = (a.astype(np.float64) for a in (x, g, inner, low))
    for i in range(layers):
        own = slice(i * rank, (i + 1) * rank)
        for name, want in (("down", inner[:, own].T @ x), ("up", g[:, i].T @ low[:, own])):
            assert distance(made[name][i].get(), before[name][i] + want) < 1e-6, (name, i)


def pair(case: tuple[int, int, int, int, int], across: bool, thin: bool) -> Operands:
    """As tests/gpu has them: rows of the results lie further apart than they are long, with 7 between them."""
    m, n, k, rank, parts = case

    def numbers(shape: tuple[int, int], seed: int, turned: bool = False) -> Array:
        drawn = rounded(shape[::-1] if turned else shape, seed, bfloat16)
        made = flame.tensor(drawn, bfloat16, "cuda").data
        return made.T if turned else made

    out, low = (flame.tensor(np.full((m, w + 64), 7.0), bfloat16, "cuda").data[:, :w] for w in (n, rank * parts))
    b, b2, made = (numbers(s, 2 + i, not across) for i, s in enumerate(((k, n), (rank, n), (k, rank * parts))))
    bias, plus = numbers((1, n), 6)[0], numbers((m, n), 7)
    if thin:
        return Operands(numbers((m, k), 0), b, low, b2, out, parts, bias, thin=made, scale=0.25)
    return Operands(numbers((m, k), 0), b, numbers((m, rank * parts), 1), b2, out, parts, plus=plus)


def check_pair(x: Operands) -> None:
    rank, part, unit = len(x.b2), x.out.shape[1] // x.parts, 2.0**-8
    a, b, b2, low = (np.asarray(y.get(), np.float64) for y in (x.a, x.b, x.b2, x.a2))
    if x.thin is not None:
        want = 0.25 * a @ np.asarray(x.thin.get(), np.float64)
        np.testing.assert_allclose(low, want, rtol=unit, atol=1e-4)
    y = a @ b + sum(np.asarray(e.get(), np.float64) for e in (x.bias, x.plus) if e is not None)
    for i in range(x.parts):
        y[:, i * part : (i + 1) * part] += low[:, i * rank : (i + 1) * rank] @ b2[:, i * part : (i + 1) * part]
    np.testing.assert_allclose(np.asarray(x.out.get(), np.float64), y, rtol=unit, atol=1e-4)
    for made in (x.out, x.a2) if x.thin is not None else (x.out,):
        assert (np.asarray(made.base)[:, made.shape[1] :] == 7).all()


def products(gpu: Any, multiprocessors: int) -> dual_gemm.DualGemm:
    return dual_gemm.DualGemm(gpu.xp, None, None, None, gpu.kernels._cubins, multiprocessors, 90)


WAYS = [
    (dual_gemm.TILES[0], False, False),
    (dual_gemm.TILES[1], True, False),
    (dual_gemm.TILES[2], False, False),
    (dual_gemm.TILES[3], True, False),
    (dual_gemm.MAKING[0], True, True),
    (dual_gemm.MAKING[1], False, True),
    (dual_gemm.MAKING[2], True, True),
    (dual_gemm.MAKING[3], False, True),
]


@pytest.mark.parametrize(("tile", "across", "thin"), WAYS, ids=str)
def test_two_products_in_one_pass(computing: Any, tile: Tile, across: bool, thin: bool) -> None:
    """Edges everywhere and several tiles a block; then layers of one input, each with columns of a2 of its own."""
    for case in ((200, 2 * tile.columns + 40, 200, 16, 1), (264, 3 * tile.columns, 72, 16, 3)):
        x = pair(case, across, thin)
        products(computing, 4).run(replace(tile, thin=16 * thin), x)
        check_pair(x)


WHOLE = [
    (dual_gemm.TILES[0], 16, False, 0),
    (dual_gemm.TILES[0], 32, True, 256),
    (dual_gemm.TILES[1], 0, False, 64),
    (dual_gemm.TILES[2], 16, True, 0),
    (dual_gemm.TILES[3], 64, False, 16),
]


@pytest.mark.parametrize(("tile", "rank", "across", "group"), WHOLE, ids=str)
def test_products_of_int8_with_factors_a_rotation_and_a_thin_product(
    computing: Any, tile: Tile, rank: int, across: bool, group: int
) -> None:
    """Edges everywhere and several tiles a block, what is added lying where the result does."""
    m, n, k = 200, (tile.columns + 64 if group < 256 else 512), 208
    rng = np.random.default_rng(rank)
    a, b = (rng.integers(-127, 128, (r, k)).astype(np.int8) for r in (m, n))
    by, over = (rng.uniform(1e-4, 2e-4, r).astype(np.float32) for r in (m, n))
    low, up, plus, bias = (rounded(s, i, bfloat16) for i, s in enumerate(((m, 64), (64, n), (m, n), (n,))))
    on = [flame.tensor(x, device="cuda").data for x in (a, b, by, over, low, plus, bias)]
    thin = up[:rank] if across else np.ascontiguousarray(up[:rank].T)
    b2 = flame.tensor(thin, device="cuda").data
    x = Operands(
        *(on[0], on[1].T, on[4][:, :rank] if rank else None, (b2 if across else b2.T) if rank else None, on[5]),
        bias=None if group else on[6],
        plus=on[5],
        factors=(on[2], None if group else on[3]),
        rotated=group,
    )
    products(computing, 4).run(tile, x)
    want = (a.astype(np.int64) @ b.astype(np.int64).T) * by[:, None].astype(np.float64)
    want = want @ rotation(n, group) if group else want * over + bias.astype(np.float64)
    want = want + low[:, :rank].astype(np.float64) @ up[:rank].astype(np.float64) + plus.astype(np.float64)
    np.testing.assert_allclose(np.asarray(on[5].get(), np.float64), want, rtol=2.0**-8, atol=2e-4)


def test_thin_products_of_parts_of_the_columns(computing: Any) -> None:
    m, n, each, rank, splits = 200, 264, 128, 16, 3
    shapes = [(m, splits * each), (splits * each, n), (splits * each, rank), (splits * rank, n)]
    given = [rounded(shape, i, bfloat16) for i, shape in enumerate(shapes)]
    a, b, thin, b2 = (flame.tensor(x, bfloat16, "cuda").data for x in given)
    low, out = (computing.kernels.empty(shape, bfloat16) for shape in ((m, splits * rank), (m, n)))
    x = Operands(a, b, low, b2, out, thin=thin, scale=0.25, splits=splits)
    products(computing, 132).run(replace(dual_gemm.MAKING[1], thin=rank), x)
    a, b, thin, b2 = (x.astype(np.float64) for x in given)
    cuts = [*range(0, splits * each + 1, each)]
    want = np.hstack([0.25 * a[:, i:j] @ thin[i:j] for i, j in pairwise(cuts)])
    np.testing.assert_allclose(np.asarray(low.get(), np.float64), want, rtol=2.0**-8, atol=1e-4)
    whole = a @ b + np.asarray(low.get(), np.float64) @ b2
    np.testing.assert_allclose(np.asarray(out.get(), np.float64), whole, rtol=2.0**-8, atol=1e-4)


MISSING = {
    "keys have come": ("wait(came, 0);", ""),
    "queries have come": ("wait(full + 8 * at.stage, at.phase);", ""),
    "registers are products'": ("begin_products();\n    scores", "scores"),
    "scores are there": ("products_done<0>();\n    softmax", "softmax"),
    "all have written": ("show_to_sender();\n    __syncthreads();", ""),
    "what was written is shown": ("show_to_sender();", ""),
    "the last tile has left": ("if (teller) sent<0>();", ""),
}


@pytest.mark.parametrize(("part", "left"), MISSING.values(), ids=MISSING)
def test_what_is_not_waited_for_shows(computing: Any, part: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in would not see such a mistake if it did all at once."""
    text = short_kv._forward_text(bfloat16)
    assert text.count(part) == 1
    without = text.replace(part, left)
    monkeypatch.setattr(short_kv, "_forward_text", lambda _: without)
    with pytest.raises(AssertionError):
        check_attention((2, 2, 200, 77), bfloat16)
