"""The sum of two matrix products in one pass: a LoRA's update of a layer costs no further pass over the result.

cuBLASLt makes one product a call, so for a @ b + a2 @ b2 it reads and writes the result again for the second, thin
product. The kernel of dual_gemm.cuh continues from the columns of a with those of a2. It can also compute a2
itself on the way, as a thin product of a. It is for compute capability 9.0 alone. Whether it is used for a problem is
decided by a rule where the mode asks for determinism, and by timing elsewhere. Otherwise `Launcher.dual_gemm` and
`Launcher.lora_gemm` call cuBLASLt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...dtype import Array, DType, int8
from ...mode import mode
from .autotuner import AutotuneCache, Autotuner
from .cubin import Cubins
from .dual_gemm_tiles import (
    BLOCK,
    DEPTH,
    MAKING,
    TILES,
    Tile,
    by_rule,
    candidate_tiles,
    fits,
    making_by_rule,
    whole_by_rule,
)
from .hopper import KIND, tensor_map, warpgroup_product
from .launch_hooks import LaunchHooks
from .nvrtc import included, struct
from .tuning import tuning_for

_STRIP = 16  # columns of a tile of the thin operand, where that is read across its rows
_LEAST = 1 << 20  # elements of the smallest result that the kernel is considered for
_RANKS = (16, 32, 48, 64)
_LONGEST_ROTATED = (1 << 31) // (4 * 127 * 128)  # terms of whole sums of which four are added up; bases may hold -128
_ADDED = np.dtype(
    [
        *(("plus", "u8"), ("bias", "u8"), ("plus_row", "i8"), ("hidden", "u8"), ("hidden_row", "i8")),
        *(("by_row", "u8"), ("by_column", "u8"), ("scale", "f4")),
    ],
    align=True,
)
_SIZES = np.dtype([("m", "i4"), ("n", "i4"), ("k", "i4"), ("part", "i4")])


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
    whole: bool = False
    rotated: int = 0


@dataclass(slots=True)
class Operands:
    """out (M, N) = a (M, K) @ b (K, N) + a2 (M, parts R) @ b2 (R, N) (+ bias (N)) (+ plus, which may be out).

    With `thin` (K, parts R), laid out as b is, a2 is first set to scale * a @ thin. With `splits` the columns of a are
    that many equal parts, each with its own rows of thin and its own columns of a2.

    Where a and b are int8, b is column-major, and a2 and b2 may be None. With `factors` of rows and columns (None: 1),
    in fp32, a @ b is multiplied by both, and its columns are rotated by groups (`whole_sums.cuh`).
    """

    a: Array
    b: Array
    a2: Array | None
    b2: Array | None
    out: Array
    parts: int = 1
    bias: Array | None = None
    plus: Array | None = None
    thin: Array | None = None
    scale: float = 1.0
    splits: int = 1
    factors: tuple[Array, Array | None] | None = None
    rotated: int = 0

    across: bool = field(init=False)
    """Whether b is row-major, b2 where b is int8; if not it is column-major."""
    matrices: tuple[Array, ...] = field(init=False)
    """All operands of the result's dtype that are matrices, each row-major: b, b2, thin transposed if not `across`."""

    def __post_init__(self) -> None:
        first = self.b if self.factors is None else self.b2
        self.across = first is not None and bool(first.strides[1] == first.itemsize)
        left = (self.a, self.a2) if self.factors is None else (self.a2,)
        right = (self.b, self.b2, self.thin) if self.factors is None else (self.b2,)
        turned = [x if self.across else x.T for x in right if x is not None]
        self.matrices = (self.out, *(x for x in (*left, self.plus) if x is not None), *turned)

    @property
    def rank(self) -> int:
        """Rows of b2; 0 without it."""
        return 0 if self.b2 is None else int(self.b2.shape[0])

    def problem(self) -> _Problem:
        """Returns what the choice of a tile depends on."""
        (m, k), n = self.a.shape, self.out.shape[1]
        rows = tuple(x.strides[0] for x in self.matrices)
        return _Problem(
            self.out.dtype,
            m,
            n,
            k,
            self.rank,
            self.parts,
            self.across,
            rows,
            self.bias is not None,
            self.plus is not None,
            0 if self.thin is None else self.splits,
            not mode().deterministic,
            self.factors is not None,
            self.rotated,
        )

    def fit(self) -> bool:
        """Tells whether the kernel can take these dtypes, sizes, strides and addresses."""
        out, extra = self.out, () if self.bias is None else (self.bias,)
        return (
            out.dtype in KIND
            and all(x.dtype == out.dtype and x.data.ptr % 16 == 0 for x in (*self.matrices, *extra))
            and all(x.strides[1] == x.itemsize and x.strides[0] % 16 == 0 for x in self.matrices)
            and (self.rank in _RANKS if self.factors is None else self._fit_whole())
            and out.shape[1] % 8 == 0
            and out.size >= _LEAST
            and (self.splits == 1 or (self.across and self.a.shape[1] % (self.splits * DEPTH) == 0))
        )

    def _fit_whole(self) -> bool:
        """Tells whether the kernel can take operands of int8."""
        rows, columns = self.a, self.b.T
        dense = all(x.flags.c_contiguous and x.shape[1] % 16 == 0 and x.data.ptr % 16 == 0 for x in (rows, columns))
        held = self.rotated <= 64 or rows.shape[1] <= _LONGEST_ROTATED
        return dense and held and self.thin is None and self.rank in (0, *_RANKS)


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
        self._ahead: set[tuple[Any, ...]] = set()
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
        by_rows, whole = (BLOCK // 2, BLOCK), x.factors is not None
        half = by_rows if x.across else (tile.columns // 2, DEPTH)
        depth = DEPTH * 2 // x.a.itemsize  # 128 bytes
        b, b2, thin = (None if y is None else y if x.across else y.T for y in (x.b, x.b2, x.thin))
        b, of_b = (x.b.T, (tile.columns // 2, depth)) if whole else (b, half)
        left = partial(tensor_map, x.a, (tile.rows, depth))
        if thin is not None:
            third = tensor_map(thin, (DEPTH, _STRIP) if x.across else (tile.thin, DEPTH))
        else:
            third = left() if x.a2 is None else tensor_map(x.a2, (tile.rows, DEPTH))
        maps = [
            *(left(), tensor_map(b, of_b), third),
            *(left() if b2 is None else tensor_map(b2, half), tensor_map(x.out, (BLOCK, BLOCK))),
        ]
        plus, hidden = ((0, 0) if y is None else (y.data.ptr, y.strides[0] // y.itemsize) for y in (x.plus, x.a2))
        bias, *by = (0 if y is None else y.data.ptr for y in (x.bias, *(x.factors or (None, None))))
        added = struct((plus[0], bias, plus[1], *hidden, *by, x.scale), _ADDED)
        (m, k), n = x.a.shape, x.out.shape[1]
        sizes = struct((m, n, k, n // x.parts), _SIZES)
        pairs = min(self._multiprocessors // 2, -(-m // (2 * tile.rows)) * -(-n // tile.columns))
        threads = 128 * (tile.consumers + 1)
        function((2 * pairs,), (threads,), (*maps, added, sizes), shared_mem=tile.shared_bytes)

    def _function(self, tile: Tile, x: Operands) -> Any:
        kind = (x.factors is not None, x.rotated)
        return self._cubins.get(*_source_key(tile, x.across, x.rank, x.out.dtype, x.splits, *kind))

    def _compile_ahead(self, problem: _Problem) -> None:
        """Compiles all tiles in parallel: the layers of one network need most of them, and each takes seconds."""
        rank, dtype, splits = problem.rank, problem.dtype, max(1, problem.making)
        kind = problem.whole, problem.rotated
        # Of int8 gradients alone are rotated, and they alone read b2 across: the other way is not needed.
        ways = (problem.across,) if problem.whole else (False, True) if splits == 1 else (True,)
        asked = (rank, dtype, problem.whole and ways, *kind)
        if asked in self._ahead:
            return
        self._ahead.add(asked)
        made = [] if problem.whole else [replace(t, thin=rank // splits) for t in MAKING]
        self._cubins.ahead(
            _source_key(tile, across, rank, dtype, splits if tile.thin else 1, *kind)
            for across in ways
            for tile in (*made, *TILES)
            if not problem.rotated or tile.columns % problem.rotated == 0
        )

    def _choose(self, problem: _Problem, x: Operands, otherwise: Callable[[Operands], None]) -> Tile | None:
        """Returns the tile by the rule, or the fastest; None if `otherwise` is better.

        A problem first met during a capture, in which nothing runs, goes by the rule.
        """
        known = [replace(t, thin=problem.rank // problem.making) for t in MAKING] if problem.making else TILES
        tiles = [t for t in known if fits(t, problem.n // problem.parts, problem.parts, problem.rotated)]
        if not problem.measured or mode().capturing:
            rule = whole_by_rule if problem.whole else making_by_rule if problem.making else by_rule
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


@lru_cache(maxsize=64)  # at every launch
def source(
    tile: Tile, across: bool, rank: int, dtype: DType, splits: int = 1, whole: bool = False, rotated: int = 0
) -> str:
    """Returns the kernel's source for a tile.

    Args:
        tile: the tile.
        across: whether b is read across its rows.
        rank: columns of a2 for a part.
        dtype: the dtype of the elements.
        splits: equal parts of the columns of a.
        whole: whether a and b are int8.
        rotated: columns of the result that are rotated together; 0: none.
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
        "WHOLE": int(whole),
        "GROUP": rotated,
    }
    parts = ["".join(f"#define {name} {value}\n" for name, value in numbers.items())]
    parts += [warpgroup_product("whole_product", tile.columns, False, int8)] if whole else []
    parts += [warpgroup_product("product", tile.columns, across, dtype)]
    if tile.thin:
        parts += [warpgroup_product("thin_product", tile.thin, across, dtype)]
        parts += [warpgroup_product("hidden_product", tile.columns, across, dtype, held=True)]
    return "".join([*parts, included('#include "backend/cuda/dual_gemm.cuh"\n')])


def _source_key(
    tile: Tile, across: bool, rank: int, dtype: DType, splits: int, whole: bool, rotated: int
) -> tuple[str, str, DType, int]:
    text = source(tile, across, rank, dtype, splits, whole, rotated)
    return text, "paired_product", dtype, tile.shared_bytes
