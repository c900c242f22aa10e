"""How columns are divided among blocks and threads: whole lines of memory, and no more blocks than run at once."""

from __future__ import annotations

from dataclasses import dataclass

_THREADS = 512
_RESIDENT = 1024  # threads of a multiprocessor: with four packets loading each, three times what hides latency
_LINE = 128  # bytes of a row that a block reads at once
_LEAST = 4  # rows to a thread
_AHEAD = 4  # packets that a thread asks for at once


@dataclass(frozen=True, slots=True)
class ColumnTiling:
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
        """Blocks that a multiprocessor is to hold at once, which limits a kernel's registers."""
        return _RESIDENT // self.threads

    @property
    def columns(self) -> int:
        """Columns to a block."""
        return self.across * self.width

    def ahead(self, operands: int) -> int:
        """Rows whose packets, for that many operands, are loaded before the first is used."""
        return max(1, _AHEAD // operands)

    def tiles(self, inner: int) -> int:
        """Blocks side by side."""
        return -(-inner // self.columns)

    def stretch(self, reduced: int, places: int, multiprocessors: int) -> int:
        """Rows to a block, where there are `places` (outputs' tiles) among which all resident blocks are divided."""
        share = max(1, multiprocessors * self.resident // places)
        return max(-(-reduced // share), _LEAST * self.lanes)


def column_tiling(inner: int, reduced: int, width: int, itemsize: int) -> ColumnTiling:
    """The tiling for `reduced` rows of `inner` elements of `itemsize` bytes, `width` to a packet.

    A block has whole warps, and at least a thread for each of its columns.
    """
    across = min(_power(-(-inner // width)), max(8, min(32, _LINE // (width * itemsize))))
    lanes = min(_THREADS // across, _power(-(-reduced // _LEAST)))
    return ColumnTiling(width, across, max(lanes, width, 32 // across))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
