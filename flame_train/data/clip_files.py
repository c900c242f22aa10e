"""Drawn clips as files: animated WebP by Pillow, MP4 by PyAV. The same frames give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

from flame_train.data.clips import EXACT
from flame_train.data.grid import Pixels, png
from flame_train.disk.atomic_write import write_atomically
from flame_train.errors import EnvironmentFault

CLIP_FILES = (".webp", ".mp4")
MAX_WEBP_SIDE = 16_383  # pixels
_QUALITY = 90  # of WebP: a grid of clips stays a few MB
# differences are not seen; with a lookahead the same frames have given two files, which differed in one frame
_H264 = {"crf": "17", "flags": "+bitexact", "x264-params": "rc-lookahead=0:mbtree=0:sync-lookahead=0"}
_USER_COMMENT, _EXIF = 0x9286, 0x8769


def ending_of(path: Path, clips: bool) -> str:
    """Returns the ending that a name of drawn images, or `clips`, should have: its own if that is one.

    Raises EnvironmentFault for an MP4 without PyAV.
    """
    ending = path.suffix.lower()
    if clips and ending == ".mp4":
        _pyav()
    return ending if clips and ending in CLIP_FILES else CLIP_FILES[0] if clips else ".png"


def sample_bytes(pixels: Pixels, fps: int, parameters: str = "") -> bytes:
    """Returns a drawn image (H, W, 3) as a PNG, or a clip (F, H, W, 3) as an animated WebP."""
    return png(pixels, parameters) if pixels.ndim == 3 else webp(pixels, times(len(pixels), fps), parameters)


def write_sample(path: Path, pixels: Pixels, fps: int, parameters: str = "") -> None:
    """Writes a drawn image or clip in the format of the name's ending, whole or not at all.

    Raises EnvironmentFault for an MP4 without PyAV, OutputError when the disk cannot take it.
    """
    made = mp4 if path.suffix.lower() == ".mp4" else sample_bytes
    still = pixels.ndim == 3 and path.suffix.lower() in CLIP_FILES
    raw = made(pixels[None] if still else pixels, fps, parameters)
    write_atomically(path, [raw], len(raw))


def times(frames: int, fps: int) -> list[int]:
    """Returns how many milliseconds each frame is shown; together they are right to one."""
    begins = [round(number * 1000 / fps) for number in range(frames + 1)]
    return [end - begin for begin, end in pairwise(begins)]


def webp(frames: Sequence[Pixels] | Pixels, milliseconds: Sequence[int], parameters: str = "") -> bytes:
    """Returns the bytes of an animated WebP; `parameters` is a comment in its EXIF, where web interfaces read it."""
    first, *more = (Image.fromarray(np.asarray(frame)) for frame in frames)
    exif = Image.Exif()
    if parameters:
        exif.get_ifd(_EXIF)[_USER_COMMENT] = b"UNICODE\0" + parameters.encode("utf-16-be")
    buffer = io.BytesIO()
    first.save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=more,
        duration=list(milliseconds),
        loop=0,
        quality=_QUALITY,
        method=4,
        exif=exif if parameters else b"",
    )
    return buffer.getvalue()


def mp4(frames: Pixels, fps: int, parameters: str = "") -> bytes:
    """Returns the bytes of an MP4 in H.264; sides become even by a row or column of the edge's pixels."""
    av = _pyav()
    height, width = (side + side % 2 for side in frames.shape[1:3])
    padded = np.pad(frames, ((0, 0), (0, height - frames.shape[1]), (0, width - frames.shape[2]), (0, 0)), mode="edge")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", options={"fflags": "+bitexact"}) as out:
        if parameters:
            out.metadata["comment"] = parameters
        track = out.add_stream("libx264", rate=Fraction(fps), options=_H264)
        track.width, track.height, track.pix_fmt = width, height, "yuv420p"
        track.codec_context.thread_count = 1
        for frame in padded:
            out.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p", **EXACT)))
        out.mux(track.encode())
    return buffer.getvalue()


def _pyav() -> ModuleType:
    try:
        import av
    except ImportError:
        raise EnvironmentFault(
            "an MP4 needs the package av: install it with `pip install 'flame-train[video]'`, or write a .webp"
        ) from None
    return av
