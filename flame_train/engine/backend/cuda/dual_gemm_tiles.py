"""The tiles by which dual_gemm.cuh makes a result, and the rules that choose one where nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tuning import SM_90

DEPTH = BLOCK = 64  # columns of a in a stage; rows and columns of the part of a result that a buffer holds
_BLOCK_BYTES = BLOCK * BLOCK * 2
_SHARED_BYTES, _ALIGNMENT = 226 << 10, 1024
_PASSES = 16  # bytes an element that a pass over sums in int32, and a LoRA's product after it, cost


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
        return BLOCK * self.high * self.consumers

    @property
    def stages(self) -> int:
        """How many stages, each with DEPTH columns of the operands, fit into shared memory."""
        return (_SHARED_BYTES - self._leaving) // self._entering

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, in bytes, with room for its alignment."""
        return self.stages * self._entering + self._leaving + _ALIGNMENT

    @property
    def _entering(self) -> int:
        return (self.rows + self.columns + self.thin) * DEPTH * 2

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
TILES = tuple(Tile(*shape, cost) for shape, cost in zip(_SHAPES, SM_90.dual_gemm_costs, strict=True))
MAKING = (Tile(2, 1, 256, 1), *TILES[1:])
"""The tiles where a2 is computed too. The first has a buffer less, as the thin operand would cost it its last stage."""


def fits(tile: Tile, part: int, parts: int, rotated: int = 0) -> bool:
    """Tells whether none of a tile's columns spread over two of the equal parts, of `part` columns each.

    Nor do columns that are `rotated` together spread over two tiles.
    """
    return (parts == 1 or part % tile.columns == 0) and (not rotated or tile.columns % rotated == 0)


def candidate_tiles(tiles: Sequence[Tile], m: int, n: int, multiprocessors: int) -> list[Tile]:
    """Returns the tiles worth timing: those whose efficiency is not far below the best one's."""
    used = [t.used(m, n, multiprocessors) for t in tiles]
    return [t for t, share in zip(tiles, used, strict=True) if share >= SM_90.tiles_timed * max(used)]


def by_rule(tiles: Sequence[Tile], m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
    """Returns the best tile, if saving a pass over the result gains more than its inefficiency costs; else None.

    Args:
        tiles: what there is to choose from.
        m, n, k: the product's sizes.
        multiprocessors: the GPU's multiprocessors.
    """
    best = max(tiles, key=lambda t: t.used(m, n, multiprocessors), default=None)
    if best is None or SM_90.dual_gemm_time / best.used(m, n, multiprocessors) > 1 + SM_90.second_product_time / k:
        return None
    return best


def making_by_rule(tiles: Sequence[Tile], m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
    """Returns the best tile, if computing a2 in it costs less than a separate launch and pass over a; else None.

    Args:
        tiles, m, n, k, multiprocessors: as in `by_rule`.
    """
    best = max(tiles, key=lambda t: t.used(m, n, multiprocessors), default=None)
    if best is None:
        return None
    t, used = SM_90, best.used(m, n, multiprocessors)
    alone = 2.0 * m * n * k / t.matmul_flops
    second = min(t.dual_gemm_time / used, 1 + t.second_product_time / k)
    apart = t.launch_seconds + 2.0 * m * k / t.thin_bytes + alone * second
    return best if alone * t.dual_gemm_time * t.lora_hidden_time / used < apart else None


def whole_by_rule(tiles: Sequence[Tile], m: int, n: int, k: int, multiprocessors: int) -> Tile | None:
    """Returns the best tile for int8, if it costs less than sums in memory and a pass over them; else None.

    Args:
        tiles, m, n, k, multiprocessors: as in `by_rule`.
    """
    best = max(tiles, key=lambda t: t.used(m, n, multiprocessors), default=None)
    if best is None:
        return None
    alone = m * n * k / SM_90.matmul_flops  # at twice the rate of 16 bits
    apart = alone + _PASSES * m * n / SM_90.thin_bytes
    return best if alone * SM_90.dual_gemm_time / best.used(m, n, multiprocessors) < apart else None
