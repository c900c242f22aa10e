"""The sum of two matrix products in one pass: a LoRA's update of a layer costs no further pass over the result.

cuBLASLt makes one product a call, so for a @ b + a2 @ b2 it reads and writes the result again for the second, thin
product. The kernel of dual_gemm.cuh continues from the columns of a with those of a2. It can also compute a2
itself on the way, as a thin product of a. It is for compute capability 9.0 alone. Whether it is used for a problem is
decided by a rule where the mode asks for determinism, and by timing elsewhere. Otherwise `Launcher.dual_gemm` and
`Launcher.lora_gemm` call cuBLASLt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...dtype import Array, DType
from ...mode import mode
from .autotuner import AutotuneCache, Autotuner
from .cubin import Cubins
from .hopper import KIND, tensor_map, warpgroup_product
from .launch_hooks import LaunchHooks
from .nvrtc import included, struct
from .tuning import SM_90, tuning_for

_DEPTH = _BLOCK = 64  # columns of a in a stage; rows and columns of the part of a result that a buffer holds
_STRIP = 16  # columns of a tile of the thin operand, where that is read across its rows
_BLOCK_BYTES = _BLOCK * _BLOCK * 2
_SHARED_BYTES, _ALIGNMENT = 226 << 10, 1024
_LEAST = 1 << 20  # elements of the smallest result that the kernel is considered for
_RANKS = (16, 32, 48, 64)
_ADDED = np.dtype(
    [("plus", "u8"), ("bias", "u8"), ("plus_row", "i8"), ("hidden", "u8"), ("hidden_row", "i8"), ("scale", "f4")],
    align=True,
)
_SIZES = np.dtype([("m", "i4"), ("n", "i4"), ("k", "i4"), ("part", "i4")])


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a result that a block makes at a time.

    It has `columns` columns, and 64 * `high` rows for each of the `consumers`, the warpgroups that multiply. Each of
    these writes its results through `buffers` buffers of 64 x 64 elements; the rest of shared memory holds `stages` of
    operands. `relative_cost` is the time for an element relative to the first tile's. `thin` is the number
    of columns of a2 that are computed as well.
    """

    consumers: int
    high: int
    columns: int
    buffers: int
    relative_cost: float = 1.0
    thin: int = 0

    @property
    def rows(self) -> int:
        return _BLOCK * self.high * self.consumers

    @property
    def stages(self) -> int:
        """How many stages, each with _DEPTH columns of the operands, fit into shared memory."""
        return (_SHARED_BYTES - self._leaving) // self._entering

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, in bytes, with room for its alignment."""
        return self.stages * self._entering + self._leaving + _ALIGNMENT

    @property
    def _entering(self) -> int:
        return (self.rows + self.columns + self.thin) * _DEPTH * 2

    @property
    def _leaving(self) -> int:
        return self.consumers * self.buffers * _BLOCK_BYTES

    def rounds(self, m: int, n: int, multiprocessors: int) -> int:
        """Returns how many of the tiles of an (m, n) result the busiest pair of multiprocessors makes."""
        return -(-(-(-m // (2 * self.rows)) * -(-n // self.columns)) // (multiprocessors // 2))

    def used(self, m: int, n: int, multiprocessors: int) -> float:
        """The efficiency, at most 1: the time of full rounds at the first tile's cost, by that of the actual rounds."""
        made = self.rounds(m, n, multiprocessors) * 2 * self.rows * self.columns * (multiprocessors // 2)
        return m * n / (made * self.relative_cost)


_SHAPES = ((2, 1, 256, 2), (2, 1, 128, 2), (3, 1, 192, 1), (1, 1, 192, 2))
_TILES = tuple(Tile(*shape, cost) for shape, cost in zip(_SHAPES, SM_90.dual_gemm_costs, strict=True))
_MAKING = (Tile(2, 1, 256, 1), *_TILES[1:])
"""The tiles where a2 is computed too. The first has a buffer less, as the thin operand would cost it its last stage."""


class _Problem(NamedTuple):
    """What the choice of a tile depends on. `rows` are the distances between the operands' rows, in bytes.

    `making` is `Operands.splits` if a2 is computed as well, else 0.
    """

    dtype: DType
    m: int
    n: int
    k: int
    rank: int
    parts: int
    across: bool
    rows: tuple[int, ...]
    bias: bool
    plus: bool
    making: int
    measured: bool


@dataclass(slots=True)
class Operands:
    """out (M, N) = a (M, K) @ b (K, N) + a2 (M, parts R) @ b2 (R, N) (+ bias (N)) (+ plus, which may be out).

    With `thin` (K, parts R), laid out as b is, a2 is first set to scale * a @ thin. With `splits` the columns of a are
    that many equal parts, each with its own rows of thin and its own columns of a2.
    """

    a: Array
    b: Array
    a2: Array
    b2: Array
    out: Array
    parts: int = 1
    bias: Array | None = None
    plus: Array | None = None
    thin: Array | None = None
    scale: float = 1.0
    splits: int = 1

    across: bool = field(init=False)
    """Whether b is row-major; if not it is column-major."""
    matrices: tuple[Array, ...] = field(init=False)
    """All operands that are matrices, each row-major: b, b2 and thin transposed unless they are `across`."""

    def __post_init__(self) -> None:
        self.across = bool(self.b.strides[1] == self.b.itemsize)
        right = [x if self.across else x.T for x in (self.b, self.b2, self.thin) if x is not None]
        more = (x for x in (self.plus, *right[2:]) if x is not None)
        self.matrices = (self.a, right[0], self.a2, right[1], self.out, *more)

    def problem(self) -> _Problem:
        """Returns what the choice of a tile depends on."""
        (m, k), n = self.a.shape, self.out.shape[1]
        rows = tuple(x.strides[0] for x in self.matrices)
        return _Problem(
            self.out.dtype,
            m,
            n,
            k,
            self.b2.shape[0],
            self.parts,
            self.across,
            rows,
            self.bias is not None,
            self.plus is not None,
            0 if self.thin is None else self.splits,
            not mode().deterministic,
        )

    def fit(self) -> bool:
        """Tells whether the kernel can take these dtypes, sizes, strides and addresses."""
        out, extra = self.out, () if self.bias is None else (self.bias,)
        return (
            out.dtype in KIND
            and all(x.dtype == out.dtype and x.data.ptr % 16 == 0 for x in (*self.matrices, *extra))
            and all(x.strides[1] == x.itemsize and x.strides[0] % 16 == 0 for x in self.matrices)
            and self.b2.shape[0] in _RANKS
            and out.shape[1] % 8 == 0
            and out.size >= _LEAST
            and (self.splits == 1 or (self.across and self.a.shape[1] % (self.splits * _DEPTH) == 0))
        )


class DualGemm:
    """The kernel, compiled for each tile, and the choice of a tile for each problem.

    Args:
        cupy: the module.
        stream: the backend's stream.
        cache: keeps choices between runs.
        launch_hooks: what hears of every launch.
        cubins: compiled kernels.
        multiprocessors: the GPU's multiprocessors.
        compute_capability: the GPU's, such as 90.
    """

    def __init__(
        self,
        cupy: Any,
        stream: Any,
        cache: AutotuneCache,
        launch_hooks: LaunchHooks,
        cubins: Cubins,
        multiprocessors: int,
        compute_capability: int,
    ) -> None:
        self._cupy, self._cache, self._launch_hooks, self._cubins = cupy, cache, launch_hooks, cubins
        self._autotuner = Autotuner(cupy, stream, tuning_for(int(cupy.cuda.Device().compute_capability)))
        self._multiprocessors, self._here = multiprocessors, compute_capability == 90
        self._chosen: dict[_Problem, Tile | None] = {}
        self._ahead: set[tuple[int, DType]] = set()
        self._lock = threading.RLock()

    def made(self, x: Operands, otherwise: Callable[[Operands], None]) -> bool:
        """Computes the result and returns True, unless `otherwise` is the better way; False if it is."""
        if not self._here or not x.fit():
            return False
        problem = x.problem()
        with self._lock:
            if problem not in self._chosen:
                self._chosen[problem] = self._choose(problem, x, otherwise)
            tile = self._chosen[problem]
        if tile is not None and self._launch_hooks.should_launch("matrix product"):
            self.run(tile, x)
        return tile is not None

    def run(self, tile: Tile, x: Operands) -> None:
        """Launches the kernel with this tile, for which `fits` is true."""
        function = self._function(tile, x)
        a, b, a2, b2, out = x.matrices[:5]
        half = (_BLOCK // 2, _BLOCK) if x.across else (tile.columns // 2, _DEPTH)
        if x.thin is None:
            third = tensor_map(a2, (tile.rows, _DEPTH))
        else:
            third = tensor_map(x.matrices[-1], (_DEPTH, _STRIP) if x.across else (tile.thin, _DEPTH))
        maps = [
            tensor_map(a, (tile.rows, _DEPTH)),
            tensor_map(b, half),
            third,
            tensor_map(b2, half),
            tensor_map(out, (_BLOCK, _BLOCK)),
        ]
        plus = (0, 0) if x.plus is None else (x.plus.data.ptr, x.plus.strides[0] // x.plus.itemsize)
        bias, hidden = 0 if x.bias is None else x.bias.data.ptr, (a2.data.ptr, a2.strides[0] // a2.itemsize)
        added = struct((plus[0], bias, plus[1], *hidden, x.scale), _ADDED)
        (m, k), n = x.a.shape, x.out.shape[1]
        sizes = struct((m, n, k, n // x.parts), _SIZES)
        pairs = min(self._multiprocessors // 2, -(-m // (2 * tile.rows)) * -(-n // tile.columns))
        threads = 128 * (tile.consumers + 1)
        function((2 * pairs,), (threads,), (*maps, added, sizes), shared_mem=tile.shared_bytes)

    def _function(self, tile: Tile, x: Operands) -> Any:
        return self._cubins.get(*_source_key(tile, x.across, x.b2.shape[0], x.out.dtype, x.splits))

    def _compile_ahead(self, problem: _Problem) -> None:
        """Compiles all tiles in parallel: the layers of one network need most of them, and each takes a second."""
        rank, dtype, splits = problem.rank, problem.dtype, max(1, problem.making)
        if (rank, dtype) in self._ahead:
            return
        self._ahead.add((rank, dtype))
        ways = (False, True) if splits == 1 else (True,)
        made = [replace(t, thin=rank // splits) for t in _MAKING]
        self._cubins.ahead(
            _source_key(tile, across, rank, dtype, splits if tile.thin else 1)
            for across in ways
            for tile in (*made, *_TILES)
        )

    def _choose(self, problem: _Problem, x: Operands, otherwise: Callable[[Operands], None]) -> Tile | None:
        """Returns the tile by the rule, or the fastest; None if `otherwise` is better.

        A problem first met during a capture, in which nothing runs, goes by the rule.
        """
        known = [replace(t, thin=problem.rank // problem.making) for t in _MAKING] if problem.making else _TILES
        tiles = [t for t in known if fits(t, problem.n // problem.parts, problem.parts)]
        if not problem.measured or mode().capturing:
            rule = making_by_rule if problem.making else by_rule
            return rule(tiles, problem.m, problem.n, problem.k, self._multiprocessors)
        tiles = candidate_tiles(tiles, problem.m, problem.n, self._multiprocessors)
        question = f"paired product {self._cubins.version} {tiles} {problem}"
        kept = self._cache.get(question)
        if kept is not None and kept.isdigit() and int(kept) <= len(tiles):
            return [None, *tiles][int(kept)]
        self._compile_ahead(problem)
        trial = self._on_trial(x)
        candidates = [partial(otherwise, trial), *(partial(self.run, t, trial) for t in tiles)]
        best = self._autotuner.fastest(candidates)
        self._cache.put(question, b"%d" % best)
        return [None, *tiles][best]

    def _on_trial(self, x: Operands) -> Operands:
        """Returns the same operands with another result, to be timed."""
        rows, row = x.out.shape[0], x.out.strides[0] // x.out.itemsize
        out = self._cupy.empty((rows, row), x.out.dtype)[:, : x.out.shape[1]]
        plus = out if x.plus is x.out else x.plus
        return replace(x, out=out, plus=plus)


def fits(tile: Tile, part: int, parts: int) -> bool:
    """Tells whether none of a tile's columns spread over two of the equal parts, of `part` columns each."""
    return parts == 1 or part % tile.columns == 0


def candidate_tiles(tiles: Sequence[Tile], m: int, n: int, multiprocessors: int) -> list[Tile]:
    """Returns the tiles worth timing: those whose efficiency is not far below the best one's."""
    used = [t.used(m, n, multiprocessors) for t in tiles]
    return [t for t, share in zip(tiles, used, strict=True) if share >= SM_90.tiles_timed * max(used)]


def by_rule(tiles: Sequence[Tile], m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
    """The most efficient tile, if saving a pass over the result gains more than its inefficiency costs; else None.

    Args:
        tiles: what there is to choose from.
        m, n, k: the product's sizes.
        multiprocessors: the GPU's multiprocessors.

    Returns:
        The tile.
    """
    best = max(tiles, key=lambda t: t.used(m, n, multiprocessors), default=None)
    if best is None or SM_90.dual_gemm_time / best.used(m, n, multiprocessors) > 1 + SM_90.second_product_time / k:
        return None
    return best


def making_by_rule(tiles: Sequence[Tile], m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
    """The most efficient tile, if computing a2 in it costs less than a separate launch and pass over a; else None.

    Args:
        tiles, m, n, k, multiprocessors: as in `by_rule`.

    Returns:
        The tile.
    """
    best = max(tiles, key=lambda t: t.used(m, n, multiprocessors), default=None)
    if best is None:
        return None
    t, used = SM_90, best.used(m, n, multiprocessors)
    alone = 2.0 * m * n * k / t.matmul_flops
    second = min(t.dual_gemm_time / used, 1 + t.second_product_time / k)
    apart = t.launch_seconds + 2.0 * m * k / t.thin_bytes + alone * second
    return best if alone * t.dual_gemm_time * t.lora_hidden_time / used < apart else None


@lru_cache(maxsize=64)  # at every launch
def source(tile: Tile, across: bool, rank: int, dtype: DType, splits: int = 1) -> str:
    """Returns the kernel's source for a tile.

    Args:
        tile: the tile.
        across: whether b is read across its rows.
        rank: columns of a2 for a part.
        dtype: the dtype of the elements.
        splits: equal parts of the columns of a.

    Returns:
        The source.
    """
    numbers = {
        "CONSUMERS": tile.consumers,
        "HIGH": tile.high,
        "COLUMNS": tile.columns,
        "BUFFERS": tile.buffers,
        "STAGES": tile.stages,
        "ACROSS": int(across),
        "RANK": rank,
        "MADE": int(tile.thin > 0),
        "SPLITS": splits,
    }
    parts = ["".join(f"#define {name} {value}\n" for name, value in numbers.items())]
    parts += [warpgroup_product("product", tile.columns, across, dtype)]
    if tile.thin:
        parts += [warpgroup_product("thin_product", tile.thin, across, dtype)]
        parts += [warpgroup_product("hidden_product", tile.columns, across, dtype, held=True)]
    return "".join([*parts, included('#include "backend/cuda/dual_gemm.cuh"\n')])


def _source_key(tile: Tile, across: bool, rank: int, dtype: DType, splits: int = 1) -> tuple[str, str, DType, int]:
    return source(tile, across, rank, dtype, splits), "paired_product", dtype, tile.shared_bytes
