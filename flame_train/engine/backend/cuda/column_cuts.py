"""How columns are cut among blocks and threads: lines of memory side by side, and few enough blocks for one wave."""

from __future__ import annotations

from dataclasses import dataclass

_THREADS = 512
_RESIDENT = 1024  # threads of a multiprocessor: four packets each on their way are three times what hides its latency
_LINE = 128  # bytes of a row that a block reads at once
_LEAST = 4  # rows to a thread
_AHEAD = 4  # packets that a thread asks for at once


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

    def stretch(self, reduced: int, places: int, multiprocessors: int) -> int:
        """Rows to a block, where so many blocks side by side and behind each other take rows of their own."""
        share = max(1, multiprocessors * self.resident // places)
        return max(-(-reduced // share), _LEAST * self.lanes)


def column_cut(inner: int, reduced: int, width: int, itemsize: int) -> ColumnCut:
    """The cut for `reduced` rows of `inner` elements of `itemsize` bytes: whole warps, a thread a column or more."""
    across = min(_power(-(-inner // width)), max(8, min(32, _LINE // (width * itemsize))))
    lanes = min(_THREADS // across, _power(-(-reduced // _LEAST)))
    return ColumnCut(width, across, max(lanes, width, 32 // across))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
