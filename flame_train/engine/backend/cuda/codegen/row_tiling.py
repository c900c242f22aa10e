"""How a row is divided among threads: whole packets for all of them where its length allows it."""

from __future__ import annotations

from dataclasses import dataclass

from ..tuning import SM_90, Tuning

_WARP = 32
_SHORT = 128  # threads to a block whose rows take a warp or less each
_BLOCK = 256  # threads to a block that goes through many rows
_OTHERS, _PACKET = (
    32,
    12,
)  # registers of a thread that hold no totals, and those of 16 bytes that it loads: as loaded, and in fp32
_REGISTERS, _MOST, _SHARED = 1 << 16, 2048, 40 << 10  # registers and threads of a multiprocessor, bytes of a block
_STAGED_ROWS = 8  # to a block: of two bytes an element and more, they are whole packets of 16 bytes at any length
_STAGED_PACKETS = 16  # of one operand to a thread
_STAGED_BYTES = 32 << 10  # of shared memory to a block


@dataclass(frozen=True, slots=True)
class RowTiling:
    """Elements per packet, threads per row, packets per thread.

    A block's `staged` rows go through shared memory, in packets wider than a row of their length has.
    """

    width: int
    threads: int
    packets: int
    staged: bool = False

    @property
    def block(self) -> int:
        """Threads to a block: rows of up to a warp share one, and a longer row has its own."""
        return self.threads * self.rows

    @property
    def rows(self) -> int:
        """Rows to a block."""
        return _STAGED_ROWS if self.staged else max(1, _SHORT // self.threads) if self.threads <= _WARP else 1

    @property
    def elements(self) -> int:
        """Elements of a row for which there is room."""
        return self.width * self.threads * self.packets


def row_tiling(columns: int, width: int, loads: int, held: int, tuning: Tuning = SM_90, together: int = 1) -> RowTiling:
    """Returns the tiling for rows of `columns` elements in packets of `width`.

    For each packet of a row a thread loads `loads` packets of 16 bytes and holds `held` in registers. Only few
    different tilings are used, so that rows of many lengths share kernels.

    Args:
        columns: elements of a row.
        width: elements of a packet.
        loads: packets of 16 bytes that a thread loads for each packet of a row.
        held: how many of these it keeps in registers.
        tuning: the thresholds of an architecture.
        together: neighbouring threads, up to a warp, that have whole groups of packets, of which a row is made.
    """
    packets = columns // width
    if packets <= _WARP:
        return RowTiling(width, 1 << (packets - 1).bit_length(), 1)
    most = min(tuning.whole_packets.get(loads, 1), max(1, tuning.packets_held // held))
    for threads in (8, 16, *range(_WARP, 513, _WARP)):
        if threads % together == 0 and packets % threads == 0 and packets // threads <= most:
            return RowTiling(width, threads, packets // threads)
    limit = max(1, min(tuning.packets_in_flight // loads, tuning.packets_held // held))
    for threads in (32, 64, 128, 256, 512):
        if -(-packets // threads) <= limit:
            return RowTiling(width, threads, -(-packets // threads))
    return RowTiling(width, 1024, -(-packets // 1024))


@dataclass(frozen=True, slots=True)
class RowSumsTiling(RowTiling):
    """A tiling for blocks that go through many rows, `together` at once, and keep totals of columns in registers.

    `resident` blocks are to be on a multiprocessor at once, which limits a kernel's registers.
    """

    together: int = 1
    resident: int = 1

    @property
    def rows(self) -> int:
        """Rows that a block has at once."""
        return self.together


def halved_tiling(columns: int, width: int) -> RowTiling:
    """Returns the tiling by which each thread has the same packets of both halves of a row.

    Half a row is whole packets of `width` elements.
    """
    half = columns // width // 2
    threads = min(_WARP, half & -half)  # the largest power of 2 that divides it
    return RowTiling(width, threads, 2 * half // threads)


def row_sums_tiling(
    columns: int, width: int, loads: int, totals: int, vectors: int, tuning: Tuning = SM_90, halves: bool = False
) -> RowSumsTiling:
    """Returns the tiling for rows of `columns` elements in packets of `width`, with so many `totals` of each column.

    For each packet of a row a thread loads `loads` packets of 16 bytes and keeps `vectors` further numbers of each
    element. Few threads with many packets are best: their sums take fewer steps, and the kernel waits for those.

    Args:
        columns: elements of a row.
        width: elements of a packet.
        loads: packets of 16 bytes that are loaded for each of a row.
        totals: sums of each column.
        vectors: numbers that are kept of each element.
        tuning: the architecture's thresholds.
        halves: whether each thread has the same packets of both halves of a row.
    """
    packets = columns // width
    most = max(1, tuning.elements_per_total * totals // (width * (1 + vectors)))
    sizes = [t for t in (8, 16, *range(_WARP, 1025, _WARP)) if -(-packets // t) <= most]
    whole = [t for t in sizes if packets % t == 0 and 2 * t <= 3 * sizes[0]]
    threads = 1 << (packets - 1).bit_length() if packets <= _WARP else (whole or sizes or [1024])[0]
    threads = halved_tiling(columns, width).threads if halves else threads
    each = -(-packets // threads)
    handed = 2 * each * totals * width * threads  # bytes for a row's totals, half of which are handed over
    together = max(1, min(_BLOCK // threads, _SHARED // handed))
    together = 1 << together.bit_length() - 1
    registers = min(255, _OTHERS + each * ((totals + vectors) * width + _PACKET * loads))
    resident = max(1, min(_MOST // (threads * together), _REGISTERS // (threads * together * registers)))
    return RowSumsTiling(width, threads, each, together=together, resident=resident)


def staged_tiling(columns: int, width: int, bytes_each: int) -> RowTiling | None:
    """The tiling for dense rows whose length allows no wide packets; None where staging them does not fit or pay.

    `bytes_each` is what all operands and outputs store for an element. Staged rows need fewer threads than such narrow
    packets would, and so their sums cost less.
    """
    packets = columns // width
    if width > 2 or packets <= 8:
        return None
    for threads in (8, 16, 32):
        tiling = RowTiling(width, threads, -(-packets // threads), staged=True)
        if tiling.packets <= _STAGED_PACKETS:
            return tiling if tiling.elements * _STAGED_ROWS * bytes_each <= _STAGED_BYTES else None
    return None
