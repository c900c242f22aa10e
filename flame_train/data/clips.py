"""A clip file becomes upright 8-bit sRGB frames at their times, or a DataError that names file, cause and remedy.

Videos are decoded by PyAV, animated WebP and GIF by Pillow. All of a clip is decoded when a dataset is read, so that
what is damaged is told before a run begins. Sizes and counts are bounded before and while a decoder works.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from PIL import Image

from flame_train.data import image_formats
from flame_train.data.buckets import Size, Span
from flame_train.data.clip_containers import check_mp4, check_webm
from flame_train.data.colour import WHITE, to_rgb
from flame_train.data.file_reading import read_bytes
from flame_train.data.images import MAX_FILE_BYTES, ImageInfo, decode_image
from flame_train.errors import DataError, FlameError, shown

Pixels = np.ndarray[Any, Any]

MAX_CLIP_BYTES = 1 << 29
MAX_FRAME_PIXELS = 1 << 24  # 4096 x 4096
MAX_FRAMES = 20_000
MAX_CLIP_PIXELS = 1 << 34  # of all frames: five minutes of 1920 x 1080 at 30 a second
MAX_ANIMATION_PIXELS = 1 << 32  # of a GIF or WebP, whose frames cost more, and may have a few bytes each

_APART = 32  # frames of which the middle one is chosen
_STILL_S = 10  # that a frame may be shown for
_REST = 8  # frames that one at an animation's end may stand for

_DEMUXERS = {image_formats.VIDEO: "mov", image_formats.WEBM: "matroska"}
_MOST_TRACKS = 16  # FFmpeg decodes some frames of each to find out what it holds; phones write up to eight
_CODECS = frozenset("h264 hevc vp8 vp9 libvpx libvpx-vp9 av1 libdav1d mpeg4 mjpeg prores".split())
_HDR = (16, 18)  # FFmpeg's numbers of the transfer functions PQ and HLG
_UNSPECIFIED, _BT709, _BT601 = 2, 1, 5  # FFmpeg's numbers of colour spaces
_SPACES = (0, 1, 4, 5, 6, 7, 9)  # that it converts: RGB, BT.709, FCC, BT.601 (two), SMPTE 240M, BT.2020
EXACT = {"interpolation": 4 | 1 << 18 | 1 << 19, "threads": 1}
"""How FFmpeg converts colours: bicubic, rounded alike wherever the pixels lie in memory."""
_HIGH_DEFINITION = 720  # lines, from which on a video that does not say so is of BT.709


Extraction = Literal["head", "middle", "chunk", "overlapping"]


@dataclass(frozen=True, slots=True)
class ClipRule:
    """Which frames of clips are taken: the keys `frames`, `fps` and `frame_extraction` of `[data]`."""

    frames: tuple[int, ...]
    fps: int
    extraction: Extraction = "head"

    def spans(self, seconds: float) -> tuple[Span, ...]:
        """Returns those of a clip of this time from first to last frame. DataError for one too short or too long."""
        there = frames_at(seconds, self.fps)
        if there > MAX_FRAMES:
            raise DataError(
                f"a clip of {there:,} frames at {self.fps} a second, expected at most {MAX_FRAMES:,}: cut it into "
                "shorter clips"
            )
        count = max((count for count in self.frames if count <= there), default=0)
        if not count:
            raise DataError(
                f"a clip of {there} frames at {self.fps} a second, expected {min(self.frames)} (data.frames): lengthen "
                "it, remove it, or set a smaller number beside the others"
            )
        firsts = {
            "head": [0],
            "middle": [(there - count) // 2],
            "chunk": range(0, there - count + 1, count),
            "overlapping": _even(there - count, -(-there // count)),
        }
        return tuple(Span(first, count, self.fps) for first in firsts[self.extraction])


def _even(last: int, count: int) -> list[int]:
    """Returns `count` whole numbers from 0 to `last`, as far from each other as each other."""
    return [0] if count == 1 else [number * last // (count - 1) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame: its time in seconds, and what makes its pixels, uint8 RGB (H, W, 3)."""

    time: Fraction
    size: Size
    pixels: Callable[[], Pixels]


def is_clip(data: bytes) -> bool:
    """Tells whether a file's content is a video, or an image with several frames that counts as one."""
    found = image_formats.sniff(data)
    if found in _DEMUXERS:
        return True
    if found not in ("GIF", "WEBP") or image_formats.declared_pixels(data, found) > MAX_FRAME_PIXELS:
        return False
    try:
        with Image.open(io.BytesIO(data), formats=[found]) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # a decoder fed damaged bytes may raise anything at all; as an image it is judged again
        return False


def probe_clip(data: bytes, name: str) -> ImageInfo | None:
    """Decodes a clip to its end, and returns the facts about it; None for an image. Raises DataError."""
    if not is_clip(data):
        _refuse_other(data, name)
        return None
    frames = frames_of(data, name)
    first = next(frames, None)
    if first is None:
        raise _no_frames(name)
    first.pixels()  # whose colours may be such as nothing converts
    last = next(iter(deque(frames, maxlen=1)), first)
    digest = hashlib.sha256(data).hexdigest()
    return ImageInfo(*last.size, digest, seconds=float(last.time))


def load_still(path: Path, *, name: str | None = None, middle: bool = False) -> Pixels:
    """Returns an image, or a clip's first frame or the one in its middle, uint8 RGB (H, W, 3). Raises DataError.

    A message begins with `name`, by default the path.
    """
    label = shown(path) if name is None else name
    data = read_bytes(path, limit=MAX_FILE_BYTES, name=label)
    if not is_clip(data):
        _refuse_other(data, label)
        return decode_image(data, label)
    frames = frames_of(data, label)
    frame = _in_the_middle(frames) if middle else next(frames, None)
    if frame is None:
        raise _no_frames(label)
    return frame.pixels()


def _in_the_middle(frames: Iterable[Frame]) -> Frame | None:
    """Returns the frame nearest to half of the time, of many frames to a part in `_APART` of it; None if none is."""
    kept, every, last = list[Frame](), 1, None
    for number, last in enumerate(frames):
        if number % every == 0:
            kept.append(last)
        if len(kept) > _APART:
            kept, every = kept[::2], 2 * every
    return None if last is None else min(kept, key=lambda frame: abs(2 * frame.time - last.time))


def _refuse_other(data: bytes, name: str) -> None:
    """Raises DataError for what is called a video, and is neither one that can be read nor an image."""
    found = image_formats.sniff(data)
    if data and found not in image_formats.IMAGES and Path(name).suffix.lower() in image_formats.CLIP_ENDINGS:
        raise DataError(f"{name}: {image_formats.refusal(found, clip=True)}")


def frames_at(seconds: float, fps: int) -> int:
    """Returns how many frames a clip of this time from first to last frame has, at so many a second."""
    return math.floor(seconds * fps + 0.5) + 1


def at_times(frames: Iterable[Frame], fps: int) -> Iterator[Frame]:
    """Yields for each time, from 0 on and `fps` a second, the frame that is nearest, of two the earlier; without end.

    After the last frame it is that one.
    """
    number, before = 0, None
    for frame in frames:
        while before is not None and 2 * Fraction(number, fps) <= before.time + frame.time:
            yield before
            number += 1
        before = frame
    while before is not None:
        yield before


def chosen_frames(frames: Iterable[Frame], span: Span) -> Iterator[Pixels]:
    """Yields the pixels of a span's frames."""
    for frame in islice(at_times(frames, span.fps), span.first, span.first + span.count):
        yield frame.pixels()


def frames_of(data: bytes, name: str) -> Iterator[Frame]:
    """Yields all frames of a clip in order, the first at time 0. Raises DataError, which begins with `name`."""
    if len(data) > MAX_CLIP_BYTES:
        raise DataError(f"{name}: larger than {MAX_CLIP_BYTES >> 20} MiB: cut it into shorter clips")
    found = image_formats.sniff(data)
    decoder, most = (_video, MAX_CLIP_PIXELS) if found in _DEMUXERS else (_animation, MAX_ANIMATION_PIXELS)
    first: Frame | None = None
    before, pixels = Fraction(-1), 0
    for number, frame in enumerate(_judged(decoder(data, found, name), name)):
        first = first or frame
        time, pixels = frame.time - first.time, pixels + math.prod(frame.size)
        if number >= MAX_FRAMES or pixels > most:
            raise _too_long(name, most)
        if frame.size != first.size:
            raise DataError(f"{name}: its frames have several sizes: convert it to one size")
        if time <= before:
            raise DataError(f"{name}: its frames have no rising times: convert it, or copy it again")
        if time - before > _STILL_S and number:
            raise DataError(
                f"{name}: one frame is shown for {float(time - before):,.0f} s, after {float(before):,.1f} s, expected "
                f"at most {_STILL_S} s: cut that out"
            )
        yield Frame(time, frame.size, _judging(name)(frame.pixels))
        before = time


def _judged(frames: Iterator[Frame], name: str) -> Iterator[Frame]:
    with _judging(name):
        yield from frames


@contextmanager
def _judging(name: str) -> Iterator[None]:
    """Makes a DataError of whatever a decoder raises."""
    try:
        yield
    except FlameError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(name) from error
    except Exception as error:  # a decoder fed damaged bytes may raise anything at all
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{name}: the clip is damaged and cannot be decoded ({what}): copy or download it again"
        ) from error


def _no_frames(name: str) -> DataError:
    return DataError(f"{name}: the clip has no frames: copy or download it again")


def _too_long(name: str, most: int) -> DataError:
    return DataError(
        f"{name}: longer than {MAX_FRAMES:,} frames or {most >> 30} gigapixels in all: cut it into shorter clips"
    )


def _too_large(name: str) -> DataError:
    return DataError(f"{name}: a frame has more than {MAX_FRAME_PIXELS:,} pixels: shrink or remove it")


def _animation(data: bytes, found: str, name: str) -> Iterator[Frame]:
    """Yields the frames of an animated GIF or WebP, transparent pixels white."""
    if found == "GIF" and not data.rstrip(b"\0").endswith(b";"):
        raise DataError(f"{name}: the GIF is cut short at byte {len(data):,}: copy or download it again")
    if image_formats.declared_pixels(data, found) > MAX_FRAME_PIXELS:
        raise _too_large(name)
    with Image.open(io.BytesIO(data), formats=[found]) as image:
        if image.width * image.height > MAX_FRAME_PIXELS:
            raise _too_large(name)
        time, times, last = Fraction(0), list[Fraction](), None
        for number in range(MAX_FRAMES + 1):
            try:
                image.seek(number)
            except EOFError:
                break
            last = Frame(time, (image.height, image.width), partial(to_rgb, image.copy(), name, WHITE, []))
            yield last
            # browsers give a frame that says at most 10 ms a tenth of a second
            shown = int(image.info.get("duration") or 0)
            times.append(Fraction(shown if shown > 10 else 100, 1000))
            time += times[-1]
        if last is not None and times[-1] >= 2 * min(times):  # encoders make one frame of equal ones
            # what is longer is a pause before it begins again
            rest = min(times[-1], _REST * min(times), _STILL_S + min(times))
            yield Frame(time - times[-1] + rest - min(times), last.size, last.pixels)


def _video(data: bytes, found: str, name: str) -> Iterator[Frame]:
    """Yields the frames of a video's first track of images, by the demuxer and decoders that are named here alone."""
    av = _pyav(name)
    (check_mp4 if found == image_formats.VIDEO else check_webm)(data, name)
    # to find out what a track holds it is decoded a little: by these decoders alone
    bounds = {"codec_whitelist": ",".join(sorted(_CODECS)), "threads": "1", "max_streams": str(_MOST_TRACKS)}
    try:
        container = av.open(io.BytesIO(data), format=_DEMUXERS[found], options=bounds, metadata_errors="replace")
    except av.error.MemoryError as error:  # its word for more tracks, too
        raise DataError(f"{name}: it has over {_MOST_TRACKS} tracks, or takes all memory: keep one track") from error
    with container:
        tracks = [each for each in container.streams.video if not each.disposition & each.disposition.attached_pic]
        if not tracks:
            raise DataError(f"{name}: the file has no track of images: remove it")
        context = tracks[0].codec_context
        codec = "unknown" if context is None else context.name
        if codec not in _CODECS:
            raise DataError(f"{name}: its codec is {codec}: convert it to H.264, HEVC, VP9 or AV1")
        if context.width * context.height > MAX_FRAME_PIXELS:
            raise _too_large(name)
        if tracks[0].frames > MAX_FRAMES or context.width * context.height * tracks[0].frames > MAX_CLIP_PIXELS:
            raise _too_long(name, MAX_CLIP_PIXELS)
        context.thread_count = 1
        context.options = {"err_detect": "explode", "max_pixels": str(MAX_FRAME_PIXELS)}
        for packet in container.demux(tracks[0]):
            if packet.is_corrupt:
                raise DataError(f"{name}: the video is damaged or cut short: copy or download it again")
            for frame in packet.decode():
                yield _video_frame(frame, tracks[0], name)


def _video_frame(frame: Any, track: Any, name: str) -> Frame:
    """Returns a frame of PyAV's. Raises DataError for one that has no time or no defined colours."""
    if frame.is_corrupt or frame.pts is None or frame.time_base is None:
        raise DataError(f"{name}: the video is damaged, or a frame has no time: copy or convert it again")
    if int(frame.color_trc) in _HDR:
        raise DataError(f"{name}: the video is HDR, whose colours have no fixed place in sRGB: convert it to SDR")
    shape = track.sample_aspect_ratio
    if shape and shape != 1:
        raise DataError(f"{name}: its pixels are not square ({shape}): convert it to square ones")
    mirrored = _is_mirrored(frame)
    turns = (round(frame.rotation / 90) + 2 * mirrored) % 4
    usual = _BT709 if frame.height >= _HIGH_DEFINITION else _BT601
    space = usual if int(frame.colorspace) == _UNSPECIFIED else int(frame.colorspace)
    if space not in _SPACES:
        raise DataError(f"{name}: its colours are of a space (FFmpeg's {space}) that is not read: convert it to BT.709")

    def pixels() -> Pixels:
        raw = frame.to_ndarray(format="rgb24", src_colorspace=space, **EXACT)
        return np.ascontiguousarray(np.rot90(raw[:, ::-1] if mirrored else raw, turns))

    size = (frame.height, frame.width) if turns % 2 == 0 else (frame.width, frame.height)
    return Frame(frame.pts * Fraction(frame.time_base), size, pixels)


def _is_mirrored(frame: Any) -> bool:
    """Tells whether the file's matrix mirrors frames before it turns them; `rotation` says how far alone."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    a, b, _, c, d = (0.0,) * 5 if matrix is None else np.frombuffer(matrix, np.int32)[:5].astype(float)
    return bool(a * d < b * c)


def _pyav(name: str) -> ModuleType:
    try:
        import av
    except ImportError:
        raise DataError(
            f"{name}: a video needs the package av: install it with `pip install 'flame-train[video]'`, or remove it"
        ) from None
    return av
