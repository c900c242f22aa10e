"""How images look at a glance: thumbnails, sharpness, and which are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

CELL = 160  # pixels: a thumbnail's longer side
_GAP = 4
_COLUMNS = 10
_MEASURED = 512  # pixels: the longer side at which sharpness is measured, so that thresholds do not depend on the size

Pixels = np.ndarray[Any, Any]


def sharpness(pixels: Pixels) -> float:
    """The variance of the Laplacian (Pech-Pacheco et al. 2000) of uint8 RGB pixels (H, W, 3), in grey levels squared.

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
    """uint8 RGB pixels with the longer side shrunk to CELL."""
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
    height, width = (max(each.shape[axis] for each in thumbnails) + _GAP for axis in (0, 1))
    columns = min(_COLUMNS, len(thumbnails))
    rows = -(-len(thumbnails) // columns)
    sheet = np.full((rows * height + _GAP, columns * width + _GAP, 3), 255, np.uint8)
    for number, pixels in enumerate(thumbnails):
        top, left = _GAP + number // columns * height, _GAP + number % columns * width
        sheet[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return sheet


def groups(names: Mapping[str, object]) -> list[list[str]]:
    """The names that have a value in common with others, group by group."""
    found: dict[object, list[str]] = {}
    for name, value in names.items():
        found.setdefault(value, []).append(name)
    return [group for group in found.values() if len(group) > 1]
