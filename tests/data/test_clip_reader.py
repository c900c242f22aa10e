"""Parts of clips: each frame is decoded once, in any order of threads, and nothing stays open."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from flame_train.data import clips
from flame_train.data.buckets import BucketRule, Span
from flame_train.data.clip_reader import ClipReader
from flame_train.data.clips import ClipRule, Extraction, Frame
from flame_train.data.views import View, ViewedImage, clip_readers
from flame_train.errors import DataError
from tests.data.drawn_clips import FPS, FRAMES, HEIGHT, WIDTH, clip, left_edges


def edge(frame: np.ndarray) -> int:
    return int(np.argmax(frame[15, :, 0] > 115))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Fraction]:
    """The times of all frames that are decoded."""
    times, frames = list[Fraction](), clips.frames_of

    def seen(data: bytes, name: str) -> Iterator[Frame]:
        return (times.append(frame.time) or frame for frame in frames(data, name))

    monkeypatch.setattr(clips, "frames_of", seen)
    return times


def written(folder: Path, kind: str) -> tuple[Path, str]:
    path = folder / f"a.{kind}"
    path.write_bytes(clip(kind))
    return path, hashlib.sha256(clip(kind)).hexdigest()


@pytest.mark.parametrize("kind", ["mp4", "webp"])
@pytest.mark.parametrize("extraction", ["chunk", "overlapping", "middle"])
@pytest.mark.parametrize("count", [5, 17])
@pytest.mark.parametrize("views", [1, 4])
def test_parts_and_views_in_any_order_decode_a_clip_once(
    kind: str, extraction: Extraction, count: int, views: int, tmp_path: Path, decoded: list[Fraction]
) -> None:
    spans = ClipRule((count,), FPS, extraction).spans(32 / FPS)
    wanted = [left_edges(clip(kind), span) for span in spans]
    for order in (1, -1):
        reader = ClipReader(*written(tmp_path, kind))
        for span in spans:
            for _ in range(views):
                reader.expect(span)
        decoded.clear()
        found = [reader.part(span, edge) for span in spans[::order] for _ in range(views)]
        assert found == [edges for edges in wanted[::order] for _ in range(views)]
        assert len(decoded) == len(set(decoded)) <= FRAMES


def test_parts_that_many_threads_read_decode_a_clip_once(tmp_path: Path, decoded: list[Fraction]) -> None:
    path, digest = written(tmp_path, "mp4")
    placement = BucketRule(32, 16).assign((HEIGHT, WIDTH))
    spans = ClipRule((9,), FPS, "overlapping").spans(32 / FPS)
    images = [
        ViewedImage(path, digest, View(replace(placement, span=span), flipped))
        for span in spans
        for flipped in (False, True)
    ]
    alone = [image.pixels() for image in images]
    for _ in range(5):
        decoded.clear()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ViewedImage.pixels, images, clip_readers(images)))
        np.testing.assert_array_equal(found, alone)
        assert len(decoded) == len(set(decoded)) <= FRAMES


def test_a_clip_is_let_go_after_its_last_part(tmp_path: Path) -> None:
    """And frames that no further part needs before that."""
    reader = ClipReader(*written(tmp_path, "mp4"))
    first, second = Span(0, 9, FPS), Span(7, 9, FPS)
    for span in (first, second):
        reader.expect(span)
    reader.part(first, edge)
    assert list(reader._kept) == [7, 8]
    reader.part(second, edge)
    assert not reader._kept
    assert reader._coming is None


def test_an_error_between_two_frames_lets_others_read(tmp_path: Path) -> None:
    """Whoever waited for the clip would wait for ever else."""
    reader, span = ClipReader(*written(tmp_path, "gif")), Span(0, 3, 25)
    for _ in range(2):
        reader.expect(span)

    def full(frame: np.ndarray) -> None:
        raise MemoryError

    with pytest.raises(MemoryError) as kept:  # whose traceback keeps what was on the way
        reader.part(span, full)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(reader.part, span, edge).result(timeout=60) == [0, 1, 2]
    assert kept


def test_readers_are_those_of_runs_of_parts(tmp_path: Path) -> None:
    """A part that begins before the last one, as at another resolution, begins anew."""
    path, digest = written(tmp_path, "gif")
    placement = BucketRule(32, 16).assign((HEIGHT, WIDTH))

    def image(path: Path, *span: int) -> ViewedImage:
        return ViewedImage(path, digest, View(replace(placement, span=Span(*span) if span else None)))

    parts = [image(path, first, 5, 25) for first in (0, 0, 5, 0)]
    other = tmp_path / "b.gif"
    readers = clip_readers([*parts, image(other, 0, 5, 25), image(other), image(other, 0, 5, 12)])
    assert readers[0] is readers[1] is readers[2]
    assert readers[5] is None
    assert len({id(reader) for reader in readers}) == 5


def test_a_clip_that_was_changed_is_told_for_each_of_its_parts(tmp_path: Path) -> None:
    path, digest = written(tmp_path, "gif")
    path.write_bytes(clip("webp"))
    reader = ClipReader(path, digest)
    for first in (0, 5):
        reader.expect(Span(first, 5, 25))
    for first in (0, 5):
        with pytest.raises(DataError, match="was changed while"):
            reader.part(Span(first, 5, 25), edge)
