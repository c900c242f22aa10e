"""The page of a quickstart, one image: what was taught, and the same prompts before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.data.grid import places, write_png

_SIDE: Final = 168  # pixels of an image on the page
_GAP: Final = 12
_COLUMNS: Final = 6
_MARGIN: Final = 20
_TITLE, _HEADING, _TEXT = 26, 19, 14  # sizes of letters, in pixels
_INK, _PALE, _LINE = "#1f2328", "#59636e", "#d1d9e0"


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """An image and the words under it."""

    pixels: Any
    """uint8 (H, W, 3)."""
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the images below it, at most six of them."""

    heading: str
    images: Sequence[CaptionedImage]


def dataset_images(folder: Path) -> list[CaptionedImage]:
    """Returns the first images of a folder with their captions, square ones first."""
    from PIL import Image

    images = [(np.asarray(Image.open(path).convert("RGB")), path) for path in sorted(folder.glob("*.png"))]
    images.sort(key=lambda pair: pair[0].shape[0] != pair[0].shape[1])
    return [
        CaptionedImage(pixels, path.with_suffix(".txt").read_text(encoding="utf-8"))
        for pixels, path in images[:_COLUMNS]
    ]


def grid_images(grid: Path, prompts: Sequence[str]) -> list[CaptionedImage]:
    """Returns the images of a sample grid with their prompts. Raises `ValueError` if it is not a grid of so many."""
    from PIL import Image

    sheet = np.asarray(Image.open(grid).convert("RGB"))
    boxes = places((sheet.shape[0], sheet.shape[1]), len(prompts))
    return [
        CaptionedImage(sheet[top : top + h, left : left + w], words)
        for (top, left, h, w), words in zip(boxes, prompts, strict=True)
    ]


def write_page(path: Path, title: str, rows: Sequence[Row], line_before: int = 0) -> Path:
    """Writes the page and returns its path.

    Args:
        title: the words on top.
        rows: the images, from top to bottom.
        line_before: the column before which a line stands in all rows but the first; 0: none.

    Raises:
        OutputError: the disk cannot take it.
    """
    from PIL import Image, ImageDraw

    width = 2 * _MARGIN + _COLUMNS * (_SIDE + _GAP) - _GAP
    heights = [_height(row) for row in rows]
    sheet = Image.new("RGB", (width, 2 * _MARGIN + _TITLE + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN - 4), title, fill=_INK, font=_font(_TITLE))
    top = _MARGIN + _TITLE
    for number, (row, height) in enumerate(zip(rows, heights, strict=True)):
        draw.text((_MARGIN, top + _HEADING), row.heading, fill=_INK, font=_font(_HEADING))
        _draw_images(sheet, draw, row, top + 2 * _HEADING + _GAP)
        if line_before and number:
            x = _MARGIN + line_before * (_SIDE + _GAP) - _GAP // 2
            draw.line([(x, top + 2 * _HEADING + _GAP), (x, top + height - _GAP)], fill=_LINE, width=2)
        top += height
    write_png(path, np.asarray(sheet))
    return path


def _draw_images(sheet: Any, draw: Any, row: Row, top: int) -> None:
    from PIL import Image

    for column, picture in enumerate(row.images):
        image = Image.fromarray(picture.pixels)
        scale = _SIDE / max(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left = _MARGIN + column * (_SIDE + _GAP)
        sheet.paste(image, (left, top))
        for line, text in enumerate(_wrapped(picture.words)):
            draw.text((left, top + _SIDE + 6 + line * (_TEXT + 4)), text, fill=_PALE, font=_font(_TEXT))


def _height(row: Row) -> int:
    lines = max((len(_wrapped(picture.words)) for picture in row.images), default=0)
    return 2 * _HEADING + _GAP + _SIDE + 6 + lines * (_TEXT + 4) + _GAP


def _wrapped(text: str) -> list[str]:
    """Breaks the words into lines no wider than an image."""
    font, lines = _font(_TEXT), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > _SIDE:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
