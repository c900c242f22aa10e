"""Small clips of each container, whose frames tell their numbers."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import pytest
from PIL import Image

from flame_train.data.buckets import Span
from flame_train.data.clips import chosen_frames, frames_of

av = pytest.importorskip("av", reason="videos are an extra")

HEIGHT, WIDTH, FRAMES, FPS = 48, 64, 33, 24
VIDEOS = {"mp4": ("mp4", "libx264"), "mov": ("mov", "libx264"), "webm": ("webm", "libvpx-vp9")}
KINDS = (*VIDEOS, "gif", "webp")


def drawn(number: int) -> np.ndarray:
    """A bright square, 10 x 10, whose left edge is at the frame's number, on grey."""
    pixels = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    pixels[10:20, number : number + 10] = (200, 50, 20)
    return pixels


@lru_cache
def video(container: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        track = out.add_stream(codec, rate=FPS, width=WIDTH, height=HEIGHT, pix_fmt="yuv420p")
        for number in range(FRAMES):
            out.mux(track.encode(av.VideoFrame.from_ndarray(drawn(number), format="rgb24")))
        out.mux(track.encode())
    return buffer.getvalue()


@lru_cache
def clip(kind: str) -> bytes:
    """A clip of 33 frames at 24 a second; of a GIF at 25, for its times are hundredths."""
    if kind in VIDEOS:
        return video(*VIDEOS[kind])
    first, *more = (Image.fromarray(drawn(number)) for number in range(FRAMES))
    times, buffer = ([42, 42, 41] * 11 if kind == "webp" else 40), io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=more, duration=times)
    return buffer.getvalue()


def left_edges(data: bytes, span: Span) -> list[int]:
    frames = list(chosen_frames(frames_of(data, "clip"), span))
    assert all(frame.shape == (HEIGHT, WIDTH, 3) and frame.dtype == np.uint8 for frame in frames)
    return [int(np.argmax(frame[15, :, 0] > 115)) for frame in frames]
