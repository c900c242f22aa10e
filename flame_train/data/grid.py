"""Images side by side on one sheet, and images as PNGs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.disk.atomic_write import write_atomically

Pixels = np.ndarray[Any, Any]
_GAP = 4  # pixels between the images of a grid


def grid(images: Sequence[Pixels], gap: int = _GAP) -> Pixels:
    """Images side by side in rows, near to square, on white; smaller ones at the top left of their places."""
    h, w = (max(image.shape[axis] for image in images) for axis in (0, 1))
    columns, rows = _columns_and_rows(len(images))
    sheet = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, np.uint8)
    for image, (top, left) in zip(images, _corners(len(images), h + gap, w + gap), strict=True):
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def places(sheet: tuple[int, int], count: int, gap: int = _GAP) -> tuple[tuple[int, int, int, int], ...]:
    """Where `grid` puts `count` images on a sheet (height, width): top, left, height and width of each place.

    None of them if no grid of so many images has that size.
    """
    columns, rows = _columns_and_rows(count)
    height, width = sheet[0] + gap, sheet[1] + gap
    if count == 0 or height % rows or width % columns or min(height // rows, width // columns) <= gap:
        return ()
    h, w = height // rows, width // columns
    return tuple((top, left, h - gap, w - gap) for top, left in _corners(count, h, w))


def _columns_and_rows(count: int) -> tuple[int, int]:
    columns = max(math.ceil(math.sqrt(count)), 1)
    return columns, max(math.ceil(count / columns), 1)


def _corners(count: int, height: int, width: int) -> list[tuple[int, int]]:
    columns, _ = _columns_and_rows(count)
    return [(i // columns * height, i % columns * width) for i in range(count)]


def png(pixels: Pixels, parameters: str = "") -> bytes:
    """The bytes of a PNG; `parameters` is the text that web interfaces read an image's settings from."""
    import io

    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer, texts = io.BytesIO(), PngInfo()
    if parameters:
        texts.add_text("parameters", parameters)
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def write_png(path: Path, pixels: Pixels, parameters: str = "") -> None:
    """A PNG, whole or not at all. Raises `OutputError` when the disk cannot take it."""
    raw = png(pixels, parameters)
    write_atomically(path, [raw], len(raw))
