"""How columns are cut among blocks and threads: lines of memory side by side, and few enough blocks for one wave."""

from __future__ import annotations

from dataclasses import dataclass, replace

_THREADS = 512
_RESIDENT = 1024  # threads of a multiprocessor: four packets each on their way are three times what hides its latency
_LINE = 128  # bytes of a row that a block reads at once
_LEAST = 4  # rows to a thread
_AHEAD = 4  # packets that a thread asks for at once
_BUSY = 0.6  # of all threads that there is room for, which keep memory busy
_CLUSTER = 8  # blocks, more than which not every card takes


@dataclass(frozen=True, slots=True)
class Card:
    """What cuts depend on: its multiprocessors, and how many blocks may hand each other their totals."""

    multiprocessors: int
    cluster: int

    @classmethod
    def of(cls, multiprocessors: int, compute_capability: int) -> Card:
        """Clusters came with compute capability 9.0."""
        return cls(multiprocessors, _CLUSTER if compute_capability >= 90 else 1)

    @property
    def threads(self) -> int:
        """That are there at once."""
        return self.multiprocessors * _RESIDENT


@dataclass(frozen=True, slots=True)
class Shares:
    """Blocks that share columns: clusters of `cluster` blocks, each of these with `stretch` rows."""

    clusters: int
    cluster: int
    stretch: int

    @property
    def blocks(self) -> int:
        """All of them, of which the last may have no rows."""
        return self.clusters * self.cluster


@dataclass(frozen=True, slots=True)
class ColumnCut:
    """Elements to a packet, threads side by side, threads one below the other."""

    width: int
    across: int
    lanes: int

    @property
    def threads(self) -> int:
        """Threads to a block."""
        return self.across * self.lanes

    @property
    def resident(self) -> int:
        """Blocks to a multiprocessor, for which a kernel leaves registers."""
        return _RESIDENT // self.threads

    @property
    def columns(self) -> int:
        """Columns to a block."""
        return self.across * self.width

    def ahead(self, operands: int) -> int:
        """Rows whose packets, of so many operands, are asked for before the first is used."""
        return max(1, _AHEAD // operands)

    def tiles(self, inner: int) -> int:
        """Blocks side by side."""
        return -(-inner // self.columns)

    def shares(self, reduced: int, places: int, card: Card) -> Shares:
        """Who takes which rows, where so many blocks side by side and behind each other take rows of their own.

        One cluster where that keeps memory busy, for then nothing is left in memory for a last block to take together.
        """
        most = max(1, min(card.threads // (self.threads * places), -(-reduced // (_LEAST * self.lanes))))
        cluster = min(most, card.cluster)
        wanted = 1 if self._busy(cluster * places, card) else most // cluster
        stretch = -(-reduced // (wanted * cluster))
        return Shares(-(-reduced // (stretch * cluster)), cluster, stretch)

    def _busy(self, blocks: int, card: Card) -> bool:
        return card.cluster > 1 and blocks * self.threads >= _BUSY * card.threads

    def narrowed(self, inner: int, outer: int, card: Card) -> ColumnCut:
        """Half a line to a block, where only that makes blocks enough for one cluster each."""
        half = replace(self, across=self.across // 2, lanes=self.lanes * 2)
        blocks = card.cluster * outer
        if self.columns * 2 > inner or self.across < 8 or self._busy(blocks * self.tiles(inner), card):
            return self
        return half if self._busy(blocks * half.tiles(inner), card) else self


def column_cut(inner: int, reduced: int, outer: int, width: int, itemsize: int, card: Card) -> ColumnCut:
    """The cut for `outer` times `reduced` rows of `inner` elements: whole warps, a thread a column or more."""
    across = min(_power(-(-inner // width)), max(8, min(32, _LINE // (width * itemsize))))
    lanes = min(_THREADS // across, _power(-(-reduced // _LEAST)))
    cut = ColumnCut(width, across, max(lanes, width, 32 // across))
    return cut.narrowed(inner, outer, card) if lanes == _THREADS // across else cut


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
