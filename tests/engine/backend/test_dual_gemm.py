"""Two products in one pass: which tile is taken, and what the kernel is told; what it computes is for tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.engine.backend.cuda import dual_gemm
from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.backend.cuda.autotuner import AutotuneCache
from flame_train.engine.backend.cuda.dual_gemm import DualGemm, Operands
from flame_train.engine.backend.cuda.dual_gemm_tiles import Tile, by_rule, fits, making_by_rule
from flame_train.engine.dtype import bfloat16, float16, float32, int8
from flame_train.engine.mode import deterministic

SIZES = st.integers(1, 1 << 15)


@pytest.mark.parametrize("tile", [*dual_gemm.TILES, *(replace(t, thin=64) for t in dual_gemm.MAKING)], ids=str)
def test_a_tile_has_room(tile: Tile) -> None:
    """For as much as a block may have, a pipeline at least three deep, and wgmma's limits."""
    assert tile.shared_bytes <= 227 << 10
    assert tile.stages >= 3
    assert tile.columns % 64 == 0
    assert tile.columns <= 256
    assert tile.high * tile.columns // 2 <= 128  # registers of sums a thread


@given(SIZES, SIZES, SIZES)
def test_the_rule_takes_a_tile_only_where_it_wins_more_than_it_leaves_unused(m: int, n: int, k: int) -> None:
    tile = by_rule(dual_gemm.TILES, m, n, k, 132)
    if tile is None:
        assert all(t.used(m, n, 132) < 1 for t in dual_gemm.TILES)
    else:
        used = tile.used(m, n, 132)
        assert used == max(t.used(m, n, 132) for t in dual_gemm.TILES) <= 1
        # The pass that is spared is the larger a part of the whole, the fewer columns a has.
        assert by_rule(dual_gemm.TILES, m, n, -(-k // 2), 132) == tile


def test_the_rule_knows_what_was_measured() -> None:
    """On an H200: (rows, columns, depth) where the kernel took 0.86, 0.88, 0.85 and 1.06, 1.03 of cuBLASLt's time."""
    for won in [(4608, 21504, 3072), (4096, 3072, 3072), (1024, 3840, 1280)]:
        assert by_rule(dual_gemm.TILES, *won, 132) is not None
    for lost in [(4096, 1280, 3840), (1024, 1280, 3840)]:
        assert by_rule(dual_gemm.TILES, *lost, 132) is None
    assert by_rule([], 4096, 4096, 4096, 132) is None


def test_the_rule_makes_thin_products_where_a_launch_is_worth_more() -> None:
    """On an H200, us with the thin product first and in one pass: (rows, columns, depth)."""
    won = [(1024, 3840, 1280), (1024, 1280, 1280), (4096, 640, 640), (16384, 640, 640)]
    lost = [(4096, 9216, 3072), (4608, 21504, 3072), (4608, 3072, 15360), (512, 12288, 3072), (4096, 7296, 2432)]
    for sizes in won:  # 28.6 24.3, 25.4 19.9, 22.0 18.1, 39.8 35.8
        assert making_by_rule(dual_gemm.MAKING, *sizes, 132) is not None
    for sizes in lost:  # 319 351, 855 969, 644 699, 70.9 75.9, 222 252
        assert making_by_rule(dual_gemm.MAKING, *sizes, 132) is None
    assert making_by_rule([], 4096, 4096, 4096, 132) is None


def test_a_tile_fits_if_its_columns_lie_in_one_part() -> None:
    wide, narrow = Tile(2, 1, 256, 2), Tile(2, 1, 128, 2)
    assert [fits(wide, n, 3) for n in (1280, 640)] == [True, False]
    assert fits(narrow, 640, 3)
    assert fits(wide, 100, 1)


def test_the_kernels_structs_are_what_is_passed(same_layout: Any) -> None:
    text = dual_gemm.source(replace(dual_gemm.MAKING[0], thin=16), False, 16, bfloat16)
    same_layout(text, {"Sizes": dual_gemm._SIZES, "Added": dual_gemm._ADDED, "TensorMap": tensor_map.STRUCT})


def operands(gpu: Any, m: int = 1024, n: int = 2048, k: int = 256, dtype: Any = bfloat16, **more: Any) -> Operands:
    empty = gpu.kernels.empty
    return Operands(
        empty((m, k), dtype),
        empty((n, k), dtype).T,
        empty((m, 16), dtype),
        empty((n, 16), dtype).T,
        more.pop("out", empty((m, n), dtype)),
        **more,
    )


def test_what_the_kernel_cannot_read_is_left_to_others(gpu: Any) -> None:
    empty = gpu.kernels.empty
    assert operands(gpu).fit()
    assert operands(gpu, dtype=float16, bias=empty((2048,), float16)).fit()
    assert operands(gpu, plus=empty((1024, 4096), bfloat16)[:, :2048]).fit()
    assert not operands(gpu, dtype=float32).fit()
    assert not operands(gpu, m=100).fit()  # too small to be worth a thought
    assert not operands(gpu, n=2052).fit()
    assert not operands(gpu, k=252).fit()  # rows that begin at odd places
    assert not operands(gpu, plus=empty((1024, 2048), float32)).fit()
    assert not operands(gpu, plus=empty((1024, 4096), bfloat16)[:, ::2]).fit()
    assert not operands(gpu, out=empty((1024, 2052), bfloat16)[:, :2048]).fit()
    across = replace(operands(gpu), b=empty((256, 2048), bfloat16), b2=empty((16, 2048), bfloat16))
    assert replace(across, thin=empty((256, 8), bfloat16), splits=2).fit()
    assert not replace(across, thin=empty((256, 8), bfloat16), splits=3).fit()


class Cubins:
    """Remembers what is launched how."""

    version = "1"

    def __init__(self) -> None:
        self.texts, self.launched = list[str](), list[tuple[Any, ...]]()
        self.begun = set[str]()

    def ahead(self, wanted: Iterable[tuple[str, str, Any, int]]) -> None:
        self.begun |= {text for text, *_ in wanted}

    def get(self, text: str, kernel: str, dtype: Any, shared_bytes: int) -> Callable[..., None]:
        self.texts.append(text)
        return lambda grid, block, args, shared_mem: self.launched.append((grid, block, args, shared_mem))


def described(x: Any, tile: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A matrix as the driver would describe it, but for what it says."""
    return np.zeros(1, tensor_map.STRUCT)


def on_card(gpu: Any, folder: Path, multiprocessors: int, compute_capability: int) -> Any:
    card, k = (multiprocessors, compute_capability), gpu.kernels
    cubins: Any = Cubins()
    return DualGemm(k.xp, gpu.stream, AutotuneCache(folder, "this card"), k.launch_hooks, cubins, *card)


@pytest.fixture
def pairs(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dual_gemm, "tensor_map", described)
    return on_card(gpu, tmp_path, 132, 90)


def test_a_launch_has_the_tiles_shape(pairs: Any, gpu: Any) -> None:
    x = operands(gpu, m=300, n=2048, plus=gpu.kernels.empty((300, 2056), bfloat16)[:, :2048])
    pairs.run(Tile(3, 1, 192, 1), x)
    ((grid, block, args, shared),) = pairs._cubins.launched
    assert grid == (2 * 11,)  # one tile of two blocks' rows, eleven of columns
    assert block == (512,)
    assert shared == Tile(3, 1, 192, 1).shared_bytes
    assert [a.shape for a in args] == [(1,)] * 7  # CuPy passes such by value
    assert args[-1].view(dual_gemm._SIZES).item() == (300, 2048, 256, 2048)
    assert args[-2].view(dual_gemm._ADDED).item() == (x.plus.data.ptr, 0, 2056, x.a2.data.ptr, 16, 0, 0, 1.0)


def test_a_thin_operand_that_is_made_comes_in_tiles_of_its_own(
    pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, maps = gpu.kernels.empty, list[tuple[Any, tuple[int, int]]]()
    monkeypatch.setattr(dual_gemm, "tensor_map", lambda x, tile: maps.append((x, tile)) or described(x, tile))
    tile = replace(dual_gemm.MAKING[0], thin=16)
    down, up = empty((16, 256), bfloat16), empty((256, 16), bfloat16)
    pairs.run(tile, operands(gpu, thin=down.T, scale=0.5))
    x = Operands(*(empty(s, bfloat16) for s in ((1024, 256), (256, 2048), (1024, 16), (16, 2048), (1024, 2048))))
    pairs.run(tile, replace(x, thin=up))
    (there, box), (across, strip) = maps[0], maps[5]
    assert (there.shape, box) == ((16, 256), (16, 64))
    assert (across.shape, strip) == ((256, 16), (64, 16))
    texts = pairs._cubins.texts
    assert ["#define ACROSS 1" in t for t in texts] == [False, True]
    assert all("#define MADE 1" in t and "m64n16k16" in t for t in texts)
    assert [args[-2].view(dual_gemm._ADDED).item()[-1] for _, _, args, _ in pairs._cubins.launched] == [0.5, 1.0]


def test_by_rule_nothing_is_measured(pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_autotuner", None)
    with deterministic(True):
        assert pairs.made(operands(gpu, m=4096), otherwise=lambda x: None)
        assert not pairs.made(operands(gpu, m=1024, n=1280, k=3840), otherwise=lambda x: None)
    assert len(pairs._cubins.launched) == 1


@pytest.mark.parametrize("best", [0, 2])
def test_the_fastest_is_found_once_and_kept(pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    asked = []

    class Autotuner:
        def fastest(self, ways: list[Callable[[], None]]) -> int:
            asked.append(len(ways))
            for way in ways:
                way()
            return best

    monkeypatch.setattr(pairs, "_autotuner", Autotuner())
    x, others = operands(gpu, n=3840), list[Operands]()
    with deterministic(False):
        for _ in range(2):
            assert pairs.made(x, others.append) == (best > 0)
        pairs._chosen.clear()  # as in the next run of the program
        assert pairs.made(x, others.append) == (best > 0)
    tiles = len(dual_gemm.candidate_tiles(dual_gemm.TILES, 1024, 3840, 132))
    assert asked == [1 + tiles]
    assert [o.out is x.out for o in others] == [False]  # what is timed writes elsewhere
    launched = pairs._cubins.launched
    assert pairs._cubins.begun.issuperset(pairs._cubins.texts)
    assert len(launched) == tiles + (3 if best else 0)


@given(m=st.integers(1, 20000), n=st.integers(1, 20000))
def test_the_tile_of_which_most_is_used_is_always_timed(m: int, n: int) -> None:
    found = dual_gemm.candidate_tiles(dual_gemm.TILES, m, n, 132)
    used = {t: t.used(m, n, 132) for t in dual_gemm.TILES}
    assert max(used, key=used.__getitem__) in found
    assert all(used[t] < min(used[f] for f in found) for t in used if t not in found)
    assert dual_gemm.candidate_tiles([], m, n, 132) == []


def test_what_layers_will_want_is_compiled_ahead(pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back, and the gradients of several layers of one input, whose thin operands lie side by side."""
    monkeypatch.setattr(pairs, "_autotuner", SimpleNamespace(fastest=lambda ways: 1))

    def arrays(*shapes: tuple[int, int]) -> list[Any]:
        return [gpu.kernels.empty(s, bfloat16) for s in shapes]

    b, b2, thin = arrays((3840, 256), (3840, 16), (16, 256))
    forward = replace(operands(gpu, n=3840), b=b.T, b2=b2.T, thin=thin.T)
    for splits in (1, 3):
        a, b, low, b2, out, thin = arrays(
            (1024, 3840), (3840, 1280), (1024, 16 * splits), (16 * splits, 1280), (1024, 1280), (3840 // splits, 16)
        )
        back = Operands(a, b, low, b2, out, thin=thin, splits=splits)
        with deterministic(False):
            for x in (forward, replace(forward, thin=None), back, replace(back, thin=None, splits=1)):
                assert pairs.made(x, lambda _: None)
        begun, got = pairs._cubins.begun, set(pairs._cubins.texts)
        assert got <= begun
        assert len(begun) == (16 if splits == 1 else 24)


def test_of_int8_products_only_the_way_that_is_asked_for_is_compiled_ahead(
    pairs: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer reads its second operand by columns and does not rotate; its gradient reads it by rows and does."""
    monkeypatch.setattr(pairs, "_autotuner", SimpleNamespace(fastest=lambda ways: 1))
    empty = gpu.kernels.empty
    rows, columns = empty((1024, 1280), int8), empty((2560, 1280), int8)
    factors = empty((1024,), float32), None
    low, up, out = empty((1024, 16), bfloat16), empty((16, 2560), bfloat16), empty((1024, 2560), bfloat16)
    back = Operands(rows, columns.T, low, up, out, factors=factors, rotated=64)
    forward = replace(back, b2=empty((2560, 16), bfloat16).T, rotated=0)
    for x, more in ((forward, 4), (back, 4), (replace(back, rotated=256), 1), (replace(back, rotated=0), 4)):
        before = len(pairs._cubins.begun)
        with deterministic(False):
            assert pairs.made(x, lambda _: None)
        assert {*pairs._cubins.texts} <= pairs._cubins.begun
        assert len(pairs._cubins.begun) == before + more


@pytest.mark.parametrize(("k", "group", "fits"), [(33024, 256, True), (33040, 256, False), (33040, 64, True)])
def test_whole_sums_of_which_four_are_added_up_stay_below_2_to_the_31(gpu: Any, k: int, group: int, fits: bool) -> None:
    assert 4 * 127 * 128 * 33024 < 2**31 <= 4 * 127 * 128 * 33040  # published bases may hold -128
    empty = gpu.kernels.empty
    factors = empty((1024,), float32), None
    x = Operands(
        *(empty((1024, k), int8), empty((1024, k), int8).T, None, None, empty((1024, 1024), bfloat16)),
        factors=factors,
        rotated=group,
    )
    assert x.fit() == fits


def test_other_cards_have_other_kernels(gpu: Any, tmp_path: Path) -> None:
    assert not on_card(gpu, tmp_path, 108, 80).made(operands(gpu), otherwise=lambda x: None)
