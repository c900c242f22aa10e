"""What clips are refused, and what is said of files that are named as something else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.data import clips
from flame_train.data.clips import ClipRule, load_still, probe_clip
from flame_train.data.dataset import Dataset, DatasetError
from flame_train.errors import DataError
from tests.data.drawn_clips import FRAMES, HEIGHT, WIDTH, av, clip, drawn


def coloured(space: int) -> bytes:
    """A video of three frames that says that its colours are of FFmpeg's colour space of this number."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        track = out.add_stream("libx264", rate=24, width=WIDTH, height=HEIGHT, pix_fmt="yuv420p")
        track.codec_context.colorspace = space
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(drawn(number), format="rgb24").reformat(format="yuv420p")
            frame.colorspace = space
            out.mux(track.encode(frame))
        out.mux(track.encode())
    return buffer.getvalue()


def animated(kind: str, milliseconds: Sequence[int]) -> bytes:
    first, *more = (Image.fromarray(drawn(number)) for number in range(len(milliseconds)))
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=more, duration=list(milliseconds))
    return buffer.getvalue()


def scanned(folder: Path, **more: bool) -> str:
    with pytest.raises(DatasetError) as raised:
        Dataset.scan(folder, default_caption="x", **{"clips": True, **more})
    return str(raised.value)


@pytest.mark.parametrize("space", [8, 10, 12, 14])
def test_a_colour_space_that_is_not_converted_is_refused(space: int, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(coloured(space))
    assert rf"a.mp4: its colours are of a space (FFmpeg's {space}) that is not read: convert" in scanned(tmp_path)
    with pytest.raises(DataError, match="its colours are of a space"):
        load_still(tmp_path / "a.mp4")


@pytest.mark.parametrize("space", [1, 4, 5, 6, 7, 9])
def test_other_colour_spaces_are_read(space: int) -> None:
    assert probe_clip(coloured(space), "clip") is not None
    assert [frame.pixels().shape for frame in clips.frames_of(coloured(space), "clip")] == [(HEIGHT, WIDTH, 3)] * 3


def test_pixels_that_no_decoder_gives_are_told_when_the_clip_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(clips, "to_rgb", broken)
    with pytest.raises(DataError, match="clip: the clip is damaged and cannot be decoded"):
        probe_clip(clip("gif"), "clip")


def test_a_frame_that_is_shown_for_long_is_refused() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as out:
        track = out.add_stream("libx264", rate=24, width=WIDTH, height=HEIGHT, pix_fmt="yuv420p")
        track.codec_context.time_base = Fraction(1, 24)
        for number, time in enumerate((0, 1, 24 * 20_000_000)):
            frame = av.VideoFrame.from_ndarray(drawn(number), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 24)
            out.mux(track.encode(frame))
        out.mux(track.encode())
    with pytest.raises(DataError, match=r"frame is shown for 20,000,000 s, after 0\.0 s, expected at most 10 s: cut"):
        probe_clip(buffer.getvalue(), "clip")
    with pytest.raises(DataError, match=r"is shown for 16 s"):
        probe_clip(animated("webp", [40, 16_000, 40]), "clip")


@pytest.mark.parametrize("extraction", ["head", "middle", "chunk", "overlapping"])
def test_a_clip_of_too_many_frames_at_the_rate_has_no_parts(extraction: clips.Extraction) -> None:
    """Also one that was remembered, which is not decoded again: the parts alone would fill the memory."""
    with pytest.raises(DataError, match=r"480,000,001 frames at 24 a second, expected at most 20,000: cut it into"):
        ClipRule((17,), 24, extraction).spans(20_000_000.0)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([100] * 10, 0.9),
        ([100] * 9 + [3000], 1.6),  # a pause before it begins again
        ([40] * 4 + [320], 0.44),  # eight equal frames
        ([40, 16_000_000], 0.32),
        ([2000, 30_000], 12.0),
    ],
)
def test_a_pause_at_an_animations_end_counts_as_a_few_frames(times: list[int], seconds: float) -> None:
    found = probe_clip(animated("webp", times), "clip")
    assert found is not None
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("frames", [1, 2, 9, FRAMES, 3 * FRAMES])
def test_the_frame_in_the_middle_is_found_by_decoding_once(
    frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, decoded = [], clips.frames_of
    monkeypatch.setattr(clips, "frames_of", lambda *of: read.append(of) or decoded(*of))
    images = [np.full((16, 16, 3), 2 * number, np.uint8) for number in range(frames + 1)]
    first, *more = map(Image.fromarray, images)
    first.save(tmp_path / "a.webp", save_all=True, append_images=more, duration=40, lossless=True)
    found = load_still(tmp_path / "a.webp", middle=True)
    assert abs(int(found[0, 0, 0]) / 2 - frames / 2) <= max(0.5, frames / 32)
    assert len(read) == 1


def test_a_video_of_no_known_container_is_told_to_become_one(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes((b"G" + bytes(range(187))) * 20)
    told = "a.mp4: expected a clip, but its content is of no known clip format: convert it to MP4 or WebM, or remove it"
    assert told in scanned(tmp_path)
    with pytest.raises(DataError, match="expected a clip"):
        load_still(tmp_path / "a.mp4")


def test_what_is_wanted_where_clips_are_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.avi").write_bytes(b"RIFF")
    assert "no usable image or clip among 1 file, e.g. a.avi" in scanned(tmp_path)
    assert "WEBP; MP4, MOV, WebM or MKV); convert clips to MP4, MOV, WebM or MKV" in scanned(tmp_path)
    (tmp_path / "b.mp4").write_bytes(b"")
    assert "data.frames" not in scanned(tmp_path)
    assert "data.frames" in scanned(tmp_path, clips=False)


@pytest.mark.parametrize("ending", [".mask", "-masklabel"])
@pytest.mark.parametrize("masks", ["files", "off"])
def test_a_clip_that_is_named_as_a_mask_is_not_trained_on(ending: str, masks: str, tmp_path: Path) -> None:
    for name in ("cat.gif", f"cat{ending}.mp4"):
        (tmp_path / name).write_bytes(clip(name[-3:]))
    with pytest.raises(DatasetError, match=rf"cat{ending}\.mp4: named as a mask, which is a still for all frames"):
        Dataset.scan(tmp_path, default_caption="x", clips=True, masks=masks)
    found = Dataset.scan(tmp_path, default_caption="x", clips=True, masks=masks, on_bad="skip")
    assert [item.key for item in found.items] == ["cat.gif"]


def test_a_clip_in_a_folder_of_control_images_is_told(tmp_path: Path) -> None:
    for folder in ("after", "before"):
        (tmp_path / folder).mkdir()
    Image.fromarray(drawn(0)).save(tmp_path / "after" / "cat.png")
    (tmp_path / "before" / "cat.mp4").write_bytes(clip("mp4"))
    with pytest.raises(DatasetError, match=r"got cat\.mp4, a clip: put a still in its place, or remove the image"):
        Dataset.scan(tmp_path / "after", default_caption="x", control=[tmp_path / "before"])


def test_files_of_one_name_are_told(tmp_path: Path) -> None:
    Image.fromarray(drawn(0)).save(tmp_path / "cat.png")
    (tmp_path / "cat.mp4").write_bytes(clip("mp4"))
    (tmp_path / "dog.gif").write_bytes(clip("gif"))
    found = Dataset.scan(tmp_path, default_caption="x", clips=True)
    (notice,) = (each for each in found.notices if "one caption file" in each)
    assert notice.startswith(
        "1 name is of several images, e.g. cat.mp4 and cat.png: they have one caption file and one"
    )
