"""Builders of image files, made on the spot: no image is kept in the repository."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PngMaker = Callable[..., bytes]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def make_png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: list[bytes],
    extra: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """A PNG written by hand from unfiltered rows: independent of the library under test."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [(b"IHDR", header), *extra, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in chunks)


@pytest.fixture
def png() -> PngMaker:
    return make_png


@pytest.fixture
def encode() -> Callable[..., bytes]:
    """encode(array or Pillow image, format, **options) -> file bytes."""

    def encode(image: Any, fmt: str, **options: Any) -> bytes:
        image = image if isinstance(image, Image.Image) else Image.fromarray(image)
        buffer = io.BytesIO()
        image.save(buffer, fmt, **options)
        return buffer.getvalue()

    return encode


@pytest.fixture
def image() -> Callable[..., np.ndarray[Any, Any]]:
    """image(height, width, seed): smooth colours and edges, so that codecs and resizing have work to do."""

    def image(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[0:height, 0:width]
        phase = rng.uniform(0, 6.28, 3)
        waves = [np.sin(x / (5 + i) + y / (9 - i) + phase[i]) for i in range(3)]
        return np.rint(127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)

    return image


@pytest.fixture
def folder(tmp_path: Path, image: Callable[..., Any], encode: Callable[..., bytes]) -> Callable[..., Path]:
    """folder({name: (height, width)}): a dataset of PNGs, each with a caption of its own."""

    def folder(sizes: dict[str, tuple[int, int]]) -> Path:
        root = tmp_path / "set"
        for seed, (name, (height, width)) in enumerate(sizes.items()):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(image(height, width, seed), "PNG"))
            path.with_suffix(".txt").write_text(f"caption of {seed}", encoding="utf-8")
        return root

    return folder
