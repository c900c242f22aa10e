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
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, Literal

import numpy as np
from PIL import Image

from flame_train.data import image_formats
from flame_train.data.buckets import Size, Span
from flame_train.data.clip_containers import check_mp4, check_webm
from flame_train.data.colour import WHITE, to_rgb
from flame_train.data.file_reading import read_bytes
from flame_train.data.images import MAX_FILE_BYTES, ImageInfo, load_image
from flame_train.errors import DataError, FlameError, shown

Pixels = np.ndarray[Any, Any]

MAX_CLIP_BYTES = 1 << 29
MAX_FRAME_PIXELS = 1 << 24  # 4096 x 4096
MAX_FRAMES = 20_000
MAX_CLIP_PIXELS = 1 << 34  # of all frames: five minutes of 1920 x 1080 at 30 a second

_LOOKED_AT = 24  # frames a second, to find the middle
_KEPT_PIXELS = 1 << 27  # of the frames that a reader keeps: 64 of 1920 x 1080

_DEMUXERS = {image_formats.VIDEO: "mov", image_formats.WEBM: "matroska"}
_CODECS = frozenset("h264 hevc vp8 vp9 libvpx libvpx-vp9 av1 libdav1d mpeg4 mjpeg prores".split())
_HDR = (16, 18)  # FFmpeg's numbers of the transfer functions PQ and HLG
_UNSPECIFIED, _BT709, _BT601 = 2, 1, 5  # FFmpeg's numbers of colour spaces
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
        """Returns those of a clip of this time from first to last frame. Raises DataError for one that is too short."""
        there = frames_at(seconds, self.fps)
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
        return None
    last = next(iter(deque(frames_of(data, name), maxlen=1)), None)
    if last is None:
        raise _no_frames(name)
    digest = hashlib.sha256(data).hexdigest()
    return ImageInfo(*last.size, image_formats.sniff(data), "RGB", digest, seconds=float(last.time))


def load_still(path: Path, *, name: str | None = None, middle: bool = False) -> Pixels:
    """Returns an image, or a clip's first frame or the one in its middle, uint8 RGB (H, W, 3). Raises DataError.

    A message begins with `name`, by default the path.
    """
    label = shown(path) if name is None else name
    data = read_bytes(path, limit=MAX_FILE_BYTES, name=label)
    if not is_clip(data):
        return load_image(path, name=label)[0]
    whole = probe_clip(data, label) if middle else None
    first = 0 if whole is None else frames_at(whole.seconds or 0.0, _LOOKED_AT) // 2
    for pixels in chosen_frames(frames_of(data, label), Span(first, 1, _LOOKED_AT)):
        return pixels
    raise _no_frames(label)


class ClipReader:
    """Reads parts of a clip, by one thread at a time. In the order of their beginnings no frame is decoded twice.

    The frames of the last part are kept for that, and of those that other threads wait for. A part that begins before
    them is read from the clip's beginning.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        """Takes the file and the hash that it had. Nothing is read yet."""
        self._path, self._sha256, self._lock = path, sha256, Lock()
        self._coming: Iterator[Frame] = iter(())
        self._kept, self._begins = deque[Frame](), list[Fraction]()

    def part(self, span: Span) -> Iterator[Pixels]:
        """Yields the pixels of a span's frames, uint8 RGB (H, W, 3). DataError if the file is another one now."""
        begin = Fraction(span.first, span.fps)
        self._begins.append(begin)
        with self._lock:
            try:
                if not self._kept or begin < self._kept[0].time:
                    self._kept.clear()
                    self._coming = frames_of(self._data(), shown(self._path))
                yield from chosen_frames(self._onward(), span)
            except DataError:
                self._kept.clear()
                raise
            finally:
                self._begins.remove(begin)

    def _data(self) -> bytes:
        data = read_bytes(self._path, limit=MAX_CLIP_BYTES, name=shown(self._path))
        if hashlib.sha256(data).hexdigest() != self._sha256:
            raise DataError(f"{shown(self._path)}: was changed while the dataset was being read; start again")
        return data

    def _onward(self) -> Iterator[Frame]:
        """Yields the kept frames and those that follow, of which the ones that parts begin with or have are kept."""
        yield from tuple(self._kept)
        for frame in self._coming:
            self._kept.append(frame)
            while len(self._kept) > 1 and (
                self._kept[1].time <= min(self._begins) or len(self._kept) * math.prod(frame.size) > _KEPT_PIXELS
            ):
                self._kept.popleft()
            yield frame


OpenClip = Callable[[Path, str], ClipReader]
"""(file, its hash) -> its reader."""


def clip_readers(count: int) -> OpenClip:
    """Returns what gives a clip's reader to any thread, and keeps so many."""
    lock, kept = Lock(), lru_cache(count)(ClipReader)

    def reader(path: Path, sha256: str) -> ClipReader:
        with lock:
            return kept(path, sha256)

    return reader


def frames_at(seconds: float, fps: int) -> int:
    """Returns how many frames a clip of this time from first to last frame has, at so many a second."""
    return math.floor(seconds * fps + 0.5) + 1


def chosen_frames(frames: Iterable[Frame], span: Span) -> Iterator[Pixels]:
    """Yields the pixels of a span's frames: for each time the frame that is nearest, of two the earlier."""
    number, before, pixels = 0, None, None

    def time() -> Fraction:
        return Fraction(span.first + number, span.fps)

    for frame in frames:
        while before is not None and number < span.count and 2 * time() <= before.time + frame.time:
            pixels = before.pixels() if pixels is None else pixels
            yield pixels
            number += 1
        if number == span.count:
            return
        before, pixels = frame, None
    while before is not None and number < span.count:
        pixels = before.pixels() if pixels is None else pixels
        yield pixels
        number += 1


def frames_of(data: bytes, name: str) -> Iterator[Frame]:
    """Yields all frames of a clip in order, the first at time 0. Raises DataError, which begins with `name`."""
    if len(data) > MAX_CLIP_BYTES:
        raise DataError(f"{name}: larger than {MAX_CLIP_BYTES >> 20} MiB: cut it into shorter clips")
    found = image_formats.sniff(data)
    frames = _video(data, found, name) if found in _DEMUXERS else _animation(data, found, name)
    first: Frame | None = None
    before, pixels = Fraction(-1), 0
    for number, frame in enumerate(_judged(frames, name)):
        first = first or frame
        time, pixels = frame.time - first.time, pixels + math.prod(frame.size)
        if number >= MAX_FRAMES or pixels > MAX_CLIP_PIXELS:
            raise _too_long(name)
        if frame.size != first.size:
            raise DataError(f"{name}: its frames have several sizes: convert it to one size")
        if time <= before:
            raise DataError(f"{name}: its frames have no rising times: convert it, or copy it again")
        yield Frame(time, frame.size, frame.pixels)
        before = time


def _judged(frames: Iterator[Frame], name: str) -> Iterator[Frame]:
    """Yields the frames; whatever a decoder raises becomes a DataError."""
    try:
        yield from frames
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


def _too_long(name: str) -> DataError:
    return DataError(
        f"{name}: longer than {MAX_FRAMES:,} frames or {MAX_CLIP_PIXELS >> 30} gigapixels in all: cut it into shorter "
        "clips"
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
            yield Frame(time - min(times), last.size, last.pixels)


def _video(data: bytes, found: str, name: str) -> Iterator[Frame]:
    """Yields the frames of a video's first track of images, by the demuxer and decoders that are named here alone."""
    av = _pyav(name)
    (check_mp4 if found == image_formats.VIDEO else check_webm)(data, name)
    # to find out what a track holds it is decoded a little: by these decoders alone
    bounds = {"codec_whitelist": ",".join(sorted(_CODECS)), "threads": "1"}
    with av.open(io.BytesIO(data), format=_DEMUXERS[found], options=bounds, metadata_errors="replace") as container:
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
            raise _too_long(name)
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
    turns = round(frame.rotation / 90) % 4
    usual = _BT709 if frame.height >= _HIGH_DEFINITION else _BT601
    space = usual if int(frame.colorspace) == _UNSPECIFIED else int(frame.colorspace)

    def pixels() -> Pixels:
        raw = frame.to_ndarray(format="rgb24", src_colorspace=space, **EXACT)
        return np.ascontiguousarray(np.rot90(raw, turns))

    size = (frame.height, frame.width) if turns % 2 == 0 else (frame.width, frame.height)
    return Frame(frame.pts * Fraction(frame.time_base), size, pixels)


def _pyav(name: str) -> ModuleType:
    try:
        import av
    except ImportError:
        raise DataError(
            f"{name}: a video needs the package av: install it with `pip install 'flame-train[video]'`, or remove it"
        ) from None
    return av
