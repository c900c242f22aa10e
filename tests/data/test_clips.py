"""Clips: the frames that are taken, and damaged and hostile files, which are refused by name within bounds."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flame_train.data import clips
from flame_train.data.bucketed import assign_buckets
from flame_train.data.buckets import BucketRule, Span
from flame_train.data.clip_reader import ClipReader
from flame_train.data.clips import ClipRule, frames_of, probe_clip
from flame_train.data.dataset import Dataset, DatasetError
from flame_train.data.images import Facts
from flame_train.errors import DataError
from tests.data.drawn_clips import FPS, HEIGHT, KINDS, VIDEOS, WIDTH, clip, drawn, left_edges, video

av = pytest.importorskip("av", reason="videos are an extra")


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_gives_the_frames_nearest_to_the_times(kind: str) -> None:
    info = probe_clip(clip(kind), "clip")
    assert info is not None
    assert info.size == (HEIGHT, WIDTH)
    assert info.seconds == pytest.approx(32 / (25 if kind == "gif" else FPS), abs=1e-3)
    assert left_edges(clip(kind), Span(0, 33, 25 if kind == "gif" else 24)) == list(range(33))
    assert left_edges(clip(kind), Span(3, 4, 5)) == [15, 20, 25, 30] if kind == "gif" else [14, 19, 24, 29]
    assert left_edges(clip(kind), Span(0, 4, 2 * (25 if kind == "gif" else FPS))) == [0, 0, 1, 1]
    colour = next(iter(frames_of(clip(kind), "clip"))).pixels()[15, 4].astype(int)
    assert abs(colour - (200, 50, 20)).max() < 25


@pytest.mark.parametrize(
    ("matrix", "upright"),
    [
        ((0, 1, 0, -1, 0, 0, 0, 0, 1), lambda seen: np.rot90(seen, -1)),
        ((-1, 0, 0, 0, -1, 0, 0, 0, 1), lambda seen: np.rot90(seen, 2)),
        ((0, -1, 0, 1, 0, 0, 0, 0, 1), lambda seen: np.rot90(seen)),
        ((-1, 0, 0, 0, 1, 0, 0, 0, 1), lambda seen: seen[:, ::-1]),
        ((1, 0, 0, 0, -1, 0, 0, 0, 1), lambda seen: seen[::-1]),
        ((0, 1, 0, 1, 0, 0, 0, 0, 1), lambda seen: seen.transpose(1, 0, 2)),
        ((0, -1, 0, -1, 0, 0, 0, 0, 1), lambda seen: np.rot90(seen, 2).transpose(1, 0, 2)),
    ],
)
def test_a_turned_or_mirrored_video_is_upright(
    matrix: tuple[int, ...], upright: Callable[[np.ndarray], np.ndarray]
) -> None:
    """A row of the matrix is where a step to the right goes, the next where one down goes, both as (right, down)."""
    data = bytearray(clip("mp4"))
    at = data.index(b"tkhd") + 4 + 40
    struct.pack_into(">9i", data, at, *(n << (30 if i % 3 == 2 else 16) for i, n in enumerate(matrix)))
    first, seen = next(frames_of(bytes(data), "clip")), next(frames_of(clip("mp4"), "clip")).pixels()
    np.testing.assert_array_equal(first.pixels(), upright(seen))
    assert first.size == first.pixels().shape[:2]


def test_a_still_is_no_clip() -> None:
    buffer = io.BytesIO()
    Image.fromarray(drawn(0)).save(buffer, "WEBP")
    assert probe_clip(buffer.getvalue(), "still") is None


@pytest.mark.parametrize(
    ("extraction", "firsts"),
    [("head", [0]), ("middle", [11]), ("chunk", [0, 17]), ("overlapping", [0, 11, 23])],
)
def test_parts_of_a_clip(extraction: clips.Extraction, firsts: list[int]) -> None:
    """A clip of 40 frames has parts of 17: 41 are too many, and 17 are more than 1."""
    spans = ClipRule((1, 17, 41), FPS, extraction).spans(39 / FPS)
    assert spans == tuple(Span(first, 17, FPS) for first in firsts)


def test_a_clip_that_is_too_short_is_told() -> None:
    with pytest.raises(DataError, match="a clip of 5 frames at 24 a second, expected 17"):
        ClipRule((17, 33), FPS).spans(4 / FPS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_clip_that_is_cut_is_refused(kind: str, share: float, tmp_path: Path) -> None:
    (tmp_path / f"a.{kind}").write_bytes(clip(kind)[: int(len(clip(kind)) * share)])
    with pytest.raises(DatasetError, match=rf"a\.{kind}: .*(cut short|damaged)"):
        Dataset.scan(tmp_path, clips=True, default_caption="x")


@pytest.mark.parametrize("parts", [("18538067",), ("18538067", "1f43b675")])
def test_a_webm_that_was_recorded_live_and_cut_is_refused(parts: tuple[str, ...]) -> None:
    """Browsers record so: neither the file nor its clusters say how long they are."""
    data = bytearray(clip("webm"))
    for begin in map(bytes.fromhex, parts):
        at = data.index(begin) + 4
        length = 9 - data[at].bit_length()
        data[at : at + length] = ((2 << 7 * length) - 1).to_bytes(length, "big")  # its marker, and "unknown"
    assert left_edges(bytes(data), Span(0, 33, FPS)) == list(range(33))
    for share in (0.3, 0.6, 0.9, 0.999):
        with pytest.raises(DataError, match="cut short"):
            probe_clip(bytes(data[: int(len(data) * share)]), "clip")


@pytest.mark.parametrize("kind", [b"stsz", b"trun"])
def test_a_file_that_declares_more_samples_than_it_has_bytes_is_refused(kind: bytes) -> None:
    """FFmpeg would take memory for 2^31 of them."""
    data = bytearray(clip("mp4"))
    if kind == b"stsz":
        at = data.index(b"stsz") + 8
        struct.pack_into(">II", data, at, 1, 0x7FFFFFFF)
    else:
        body = struct.pack(">4sII", b"trun", 0, 0x7FFFFFFF)
        run = struct.pack(">I", len(body) + 4) + body
        part = struct.pack(">I4s", len(run) + 8, b"traf") + run
        data += struct.pack(">I4s", len(part) + 8, b"moof") + part
    with pytest.raises(DataError, match=r"declares 2,147,483,647 samples"):
        probe_clip(bytes(data), "clip")


def box(kind: bytes, *inside: bytes) -> bytes:
    body = b"".join(inside)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


@pytest.mark.parametrize(
    ("further", "match"),
    [
        # a chunk of 2^31 samples, 30 times over; runs of samples without a byte, each as many as the file has
        (box(b"moov", box(b"stbl", box(b"stsc", words(0, 1, 1, 1 << 31, 1)), box(b"stco", words(0, 30)))), "samples"),
        (box(b"moov", box(b"stbl", box(b"stco", words(0, 30)), box(b"stsc", words(0, 1, 1, 1 << 31, 1)))), "samples"),
        (box(b"moof", box(b"traf", *[box(b"trun", words(0, 4000))] * 50)), "declares [0-9,]+ samples"),
        (box(b"moov", box(b"trak", box(b"edts", box(b"elst", words(0, 200))))), "cut together of 200 parts"),
        (box(b"moov", box(b"cmov")), "its index is compressed"),
    ],
)
def test_what_a_small_file_would_make_ffmpeg_do_at_length_is_refused(further: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match):
        probe_clip(clip("mp4") + further, "clip")


def test_a_track_is_looked_into_by_the_listed_decoders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demuxer decodes a little to find out what a track holds; here a picture of 81 million pixels."""
    opened = {}
    real = av.open
    monkeypatch.setattr(av, "open", lambda *args, **more: opened.update(more.get("options", {})) or real(*args, **more))
    probe_clip(clip("mp4"), "clip")
    assert "png" not in opened["codec_whitelist"].split(",")


def test_an_animation_of_60_frames_a_second_is_a_second_long() -> None:
    """Pages play times from 11 ms on as they are."""
    first, *more = (Image.fromarray(drawn(number % 50)) for number in range(60))
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", save_all=True, append_images=more, duration=[17, 17, 16] * 20, lossless=True)
    found = probe_clip(buffer.getvalue(), "clip")
    assert found is not None
    assert found.seconds == pytest.approx(1 - 0.017, abs=0.002)


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animation_that_rests_at_its_end_is_as_long_as_it_is_shown(kind: str) -> None:
    """Encoders make one frame of equal ones, which is shown for longer."""
    first, *more = (Image.fromarray(drawn(min(number, 4))) for number in range(12))
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=more, duration=40)
    found = probe_clip(buffer.getvalue(), "clip")
    assert found is not None
    assert found.seconds == pytest.approx(11 * 0.04)
    assert left_edges(buffer.getvalue(), Span(0, 12, 25)) == [0, 1, 2, 3, *[4] * 8]


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        ("MAX_FRAMES", "longer than 4 frames"),
        ("MAX_CLIP_PIXELS MAX_ANIMATION_PIXELS", "longer than"),
        ("MAX_FRAME_PIXELS", "more than 4 pix"),
        ("MAX_CLIP_BYTES", "larger than"),
    ],
)
@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "webp"])
def test_limits(kind: str, limit: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip(kind)
    for name in limit.split():
        monkeypatch.setattr(clips, name, 4)
    with pytest.raises(DataError, match=match):
        list(frames_of(data, "clip"))


def test_few_bytes_of_an_animation_are_no_minutes_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GIF of 24 KB may have a thousand frames of 4096 x 4096 pixels, of each of which it changes one."""
    monkeypatch.setattr(clips, "MAX_ANIMATION_PIXELS", 3 * HEIGHT * WIDTH)
    with pytest.raises(DataError, match="longer than"):
        list(frames_of(clip("gif"), "clip"))
    assert len(list(frames_of(clip("mp4"), "clip"))) == 33


@pytest.mark.parametrize("kind", ["mp4", "mov"])  # of a WebM the first 16 alone are seen
def test_a_file_of_many_tracks_is_refused(kind: str) -> None:
    """FFmpeg decodes frames of each before it says how many there are: 74 KB took 1.6 GiB."""
    made = {}
    for count in (16, 17):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=VIDEOS[kind][0]) as out:
            tracks = [out.add_stream(VIDEOS[kind][1], rate=FPS, width=WIDTH, height=HEIGHT) for _ in range(count)]
            for track in tracks:
                out.mux(track.encode(av.VideoFrame.from_ndarray(drawn(0), format="rgb24")))
                out.mux(track.encode())
        made[count] = buffer.getvalue()
    assert probe_clip(made[16], "clip") is not None
    with pytest.raises(DataError, match="clip: it has over 16 tracks"):
        probe_clip(made[17], "clip")


def test_a_codec_that_is_not_listed_is_named() -> None:
    with pytest.raises(DataError, match="its codec is ffv1: convert it"):
        probe_clip(video("matroska", "ffv1"), "clip")


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"pip install 'flame-train\[video\]'"):
        probe_clip(clip("mp4"), "clip")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_changed_container_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    whole = bytearray(clip(kind))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(st.sampled_from([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\x10\0\0", b"\1", b""]))
        whole[at : at + data.draw(st.integers(0, 8))] = new
    with contextlib.suppress(DataError):
        info = probe_clip(bytes(whole), "clip")
        assert info is None or 0 <= (info.seconds or 0) < 1e9


def folder_of(path: Path, write: Callable[[str, bytes], None]) -> None:
    write("a.mp4", clip("mp4"))
    write("b.gif", clip("gif"))
    still = io.BytesIO()
    Image.fromarray(drawn(3)).save(still, "PNG")
    write("c.png", still.getvalue())
    mask = io.BytesIO()
    Image.fromarray(np.where(drawn(3)[..., 0] > 100, 255, 0).astype(np.uint8)).save(mask, "PNG")
    write("a.mask.png", mask.getvalue())


def test_a_folder_of_clips_and_stills(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda name, data: (tmp_path / name).write_bytes(data) and None)
    dataset = Dataset.scan(tmp_path, clips=True, default_caption="x", masks="files")
    assert [item.key for item in dataset.items] == ["a.mp4", "b.gif", "c.png"]
    assert [item.seconds is None for item in dataset.items] == [False, False, True]
    assert [item.mask is None for item in dataset.items] == [False, True, True]
    placed = assign_buckets(dataset, BucketRule(32, 16), clips=ClipRule((9,), 12, "chunk"))
    shapes = [(item.key, placement.shape, placement.span) for item, placement in placed]
    assert shapes == [
        ("a.mp4", (32, 32, 9), Span(0, 9, 12)),
        ("b.gif", (32, 32, 9), Span(0, 9, 12)),
        ("c.png", (32, 32), None),
    ]
    (path, digest), (_, _, span) = (dataset.items[0].path, dataset.items[0].sha256), shapes[0]
    assert span is not None
    assert ClipReader(path, digest).part(span, np.shape) == [(HEIGHT, WIDTH, 3)] * 9
    path.write_bytes(clip("mov"))
    with pytest.raises(DataError, match="was changed while"):
        ClipReader(path, digest).part(span, np.shape)


def test_what_is_remembered_of_a_clip_is_none_of_an_image(tmp_path: Path) -> None:
    """A GIF that was read as a clip is still refused where there are no clips."""
    (tmp_path / "b.gif").write_bytes(clip("gif"))
    (item,) = Dataset.scan(tmp_path, clips=True, default_caption="x").items
    seen: dict[str, Facts] = {item.sha256: item.facts}
    (again,) = Dataset.scan(tmp_path, clips=True, default_caption="x", seen=seen).items
    assert again.facts == item.facts
    with pytest.raises(DatasetError, match="several frames"):
        Dataset.scan(tmp_path, default_caption="x", seen=seen)


def test_clips_that_are_not_asked_for_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip("mp4"))
    with pytest.raises(DatasetError, match=r"clips need a model of video, and data\.frames"):
        Dataset.scan(tmp_path, default_caption="x")
    (tmp_path / "b.gif").write_bytes(clip("gif"))
    with pytest.raises(DatasetError, match=r"b\.gif: .*frame you want; clips need a model of video, and data\.frames"):
        Dataset.scan(tmp_path, default_caption="x")
