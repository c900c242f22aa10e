"""Checks a video file's boxes before a demuxer sees it: cut files, and counts for which it would take memory.

FFmpeg takes memory by the counts that a file declares, without regard to the file's size. So no count here is above
what the file has bytes for. It also accepts files that were cut, as players want it.
"""

from __future__ import annotations

from collections.abc import Iterator

from flame_train.errors import DataError

_MOST_SAMPLES = 1 << 25  # of one track: 24 bytes each in FFmpeg
_MOST_EDITS = 64  # a list of them repeats what it names, so that a small file lasts for hours
_DEPTH = 8
_INSIDE = frozenset({b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl", b"moof", b"traf"})
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675


def check_mp4(data: bytes, name: str) -> None:
    """Raises DataError for an MP4 or MOV file that is cut short, or declares more samples than it can have."""
    chunks, runs, fragments = 0, list[tuple[int, int]](), 0
    for kind, begin, end in _boxes(data, 0, len(data), name):
        declared = _word(data, begin + 4)
        if kind in (b"stsz", b"stz2"):
            most = len(data) // max(declared, 1) if kind == b"stsz" else 2 * len(data)
            _check_count(_word(data, begin + 8), most, name)
        elif kind == b"trun":
            fragments += declared
            _check_count(fragments, len(data), name)
        elif kind == b"stbl":
            chunks, runs = 0, []
        elif kind in (b"stco", b"co64"):
            chunks = declared
        elif kind == b"stsc":
            runs = [(_word(data, at), _word(data, at + 4)) for at in range(begin + 8, end - 11, 12)]
        elif kind == b"elst" and declared > _MOST_EDITS:
            raise DataError(f"{name}: it is cut together of {declared:,} parts: convert it, and its frames once each")
        elif kind == b"cmov":
            raise DataError(f"{name}: its index is compressed: convert it")
        if kind in (b"stsc", b"stco", b"co64"):
            _check_count(_in_chunks(runs, chunks), len(data), name)


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _in_chunks(runs: list[tuple[int, int]], chunks: int) -> int:
    """Returns how many samples so many chunks have: `runs` are (first chunk from 1, samples of each from there on)."""
    ends = [*(first for first, _ in runs[1:]), chunks + 1]
    return sum(max(end - first, 0) * samples for (first, samples), end in zip(runs, ends, strict=True)) if runs else 0


def check_webm(data: bytes, name: str) -> None:
    """Raises DataError for a WebM or Matroska file that is cut short."""
    at = 0
    while at < len(data):
        number, at = _number(data, at, keep=True)
        size, at = _number(data, at)
        if size is None:  # written while it was recorded: it ends where what is inside ends
            if number not in (_SEGMENT, _CLUSTER):
                return
            continue
        if at + size > len(data):
            raise _cut(name, len(data))
        at += size
        if number == _SEGMENT:
            return


def _boxes(data: bytes, at: int, end: int, name: str, depth: int = 0) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, begin and end of every box, and of those inside. Raises DataError for one beyond the file's end."""
    while at + 8 <= end:
        size, kind, begin = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], at + 8
        if size == 1:
            size, begin = int.from_bytes(data[at + 8 : at + 16], "big"), at + 16
        stop = end if size == 0 else at + size
        if stop > end and depth == 0:
            raise _cut(name, len(data))
        if stop < begin or stop > end or depth > _DEPTH:
            raise DataError(f"{name}: the video is damaged (a box of it has no valid size): copy or download it again")
        yield kind, begin, stop
        if kind in _INSIDE:
            yield from _boxes(data, begin, stop, name, depth + 1)
        at = stop


def _number(data: bytes, at: int, keep: bool = False) -> tuple[int | None, int]:
    """Returns a number of EBML and where it ends; with its length marker if `keep`. None: it says "unknown"."""
    first = data[at] if at < len(data) else 0
    length = 9 - first.bit_length()
    raw = int.from_bytes(data[at : at + length], "big")
    marker = 1 << 7 * length
    value = raw if keep else raw ^ marker
    return (None if not keep and value == marker - 1 else value), at + length


def _check_count(count: int, most: int, name: str) -> None:
    if count > min(most, _MOST_SAMPLES):
        raise DataError(f"{name}: the video is damaged (it declares {count:,} samples): copy or download it again")


def _cut(name: str, length: int) -> DataError:
    return DataError(f"{name}: the video is cut short at byte {length:,}: copy or download it again")
