"""Images side by side on one sheet, how they look at a glance (sharpness, which are alike), and images as PNGs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flame_train.disk.atomic_write import write_atomically

CELL = 160  # pixels: a thumbnail's longer side
_SHEET_GAP = 4
_COLUMNS = 10
_MEASURED = 512  # pixels: the longer side at which sharpness is measured, so that thresholds do not depend on the size

Pixels = np.ndarray[Any, Any]


def sharpness(pixels: Pixels) -> float:
    """Returns the variance of the Laplacian (Pech-Pacheco et al.

    2000) of uint8 RGB pixels (H, W, 3), in grey levels squared.

    Photographs in focus have some hundreds, blurred ones less than 50.
    """
    image = Image.fromarray(pixels).convert("L")
    image.thumbnail((_MEASURED, _MEASURED), Image.Resampling.LANCZOS)
    grey = np.asarray(image).astype(np.float64)
    if min(grey.shape) < 3:
        return 0.0
    around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
    return float((around - 4.0 * grey[1:-1, 1:-1]).var())


def fingerprint(pixels: Pixels) -> int:
    """64 bits that images alike share, whatever their size: where grey falls from one of 9 x 8 pixels to the next."""
    small = np.asarray(Image.fromarray(pixels).convert("L").resize((9, 8), Image.Resampling.BOX)).astype(np.int16)
    return int.from_bytes(np.packbits(small[:, 1:] < small[:, :-1]).tobytes(), "big")


def thumbnail(pixels: Pixels) -> Pixels:
    """Returns uint8 RGB pixels with the longer side shrunk to CELL."""
    image = Image.fromarray(pixels)
    image.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    return np.array(image)


def side_by_side(thumbnails: Sequence[Pixels]) -> Pixels:
    """Thumbnails in one row on white, without gaps."""
    height, width = max(each.shape[0] for each in thumbnails), sum(each.shape[1] for each in thumbnails)
    row, left = np.full((height, width, 3), 255, np.uint8), 0
    for each in thumbnails:
        row[: each.shape[0], left : left + each.shape[1]] = each
        left += each.shape[1]
    return row


def contact_sheet(thumbnails: Sequence[Pixels]) -> Pixels:
    """Thumbnails in rows on white, each in a place that holds the largest, uint8 (H, W, 3)."""
    height, width = (max(each.shape[axis] for each in thumbnails) + _SHEET_GAP for axis in (0, 1))
    columns = min(_COLUMNS, len(thumbnails))
    rows = -(-len(thumbnails) // columns)
    sheet = np.full((rows * height + _SHEET_GAP, columns * width + _SHEET_GAP, 3), 255, np.uint8)
    for number, pixels in enumerate(thumbnails):
        top, left = _SHEET_GAP + number // columns * height, _SHEET_GAP + number % columns * width
        sheet[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return sheet


def groups(names: Mapping[str, object]) -> list[list[str]]:
    """Returns the names that have a value in common with others, group by group."""
    by_fingerprint: dict[object, list[str]] = {}
    for name, value in names.items():
        by_fingerprint.setdefault(value, []).append(name)
    return [group for group in by_fingerprint.values() if len(group) > 1]


_GAP = 4  # pixels between the images of a grid


def grid(images: Sequence[Pixels], gap: int = _GAP) -> Pixels:
    """Images side by side in rows, near to square, on white; smaller ones at the top left of their places.

    Where any is a clip (F, H, W, 3) all are one, the last frame of shorter ones to the end.
    """
    frames = max(len(image) if image.ndim == 4 else 1 for image in images)
    if any(image.ndim == 4 for image in images):
        return np.stack([grid([_frame(image, number) for image in images], gap) for number in range(frames)])
    h, w = (max(image.shape[axis] for image in images) for axis in (0, 1))
    sheet = np.full((*grid_size([image.shape[:2] for image in images], gap), 3), 255, np.uint8)
    for image, (top, left) in zip(images, _corners(len(images), h + gap, w + gap), strict=True):
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def grid_size(sizes: Sequence[tuple[int, ...]], gap: int = _GAP) -> tuple[int, int]:
    """Returns (height, width) of a grid of images of these sizes (H, W)."""
    columns, rows = _columns_and_rows(len(sizes))
    height, width = (max(side) for side in zip(*sizes, strict=True))
    return rows * (height + gap) - gap, columns * (width + gap) - gap


def _frame(image: Pixels, number: int) -> Pixels:
    still: Pixels = image[min(number, len(image) - 1)] if image.ndim == 4 else image
    return still


def places(sheet: tuple[int, int], count: int, gap: int = _GAP) -> tuple[tuple[int, int, int, int], ...]:
    """Returns top, left, height and width of each of `count` images on a sheet; none if no grid has that size."""
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
    """Returns the bytes of a PNG; `parameters` is the text that web interfaces read an image's settings from."""
    import io

    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer, texts = io.BytesIO(), PngInfo()
    if parameters:
        texts.add_text("parameters", parameters)
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def write_png(path: Path, pixels: Pixels) -> None:
    """Writes a PNG, whole or not at all. Raises `OutputError` when the disk cannot take it."""
    raw = png(pixels)
    write_atomically(path, [raw], len(raw))
