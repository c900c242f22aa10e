"""A small dataset drawn by code: blue shapes on warm backgrounds, each with a caption that says what is to be seen."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flame_train.io.durable import write_durably

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Colour = tuple[int, int, int]

_SIZES: Final = ((192, 192), (240, 144), (144, 240))  # width, height: square, wide, tall
_BACKGROUNDS: Final = {
    "a yellow": (248, 214, 92),
    "an orange": (244, 152, 66),
    "a red": (214, 82, 62),
    "a cream": (250, 232, 196),
}
_BLUES: Final = {"dark blue": (28, 52, 132), "blue": (40, 96, 200), "sky blue": (96, 172, 236)}
_SHAPES: Final = {"circle": 0, "triangle": 3, "square": 4}  # corners
_FINER: Final = 4  # drawn this much larger, then scaled down, for smooth edges


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture: what is drawn, and the sentence that says so."""

    name: str
    size: tuple[int, int]
    background: Colour
    colour: Colour
    corners: int
    radius: float  # of the shape, in shares of the shorter side
    caption: str


def drawings() -> Iterator[Drawing]:
    """Twelve pictures: each shape on each background, in three sizes and three blues. Always the same ones."""
    blues = list(_BLUES)
    for row, (ground, background) in enumerate(_BACKGROUNDS.items()):
        for column, (shape, corners) in enumerate(_SHAPES.items()):
            blue = blues[(row + column) % len(blues)]
            yield Drawing(
                f"{shape}-{row + 1}", _SIZES[(row + 2 * column) % len(_SIZES)], background, _BLUES[blue], corners,
                0.30 + 0.03 * ((row + column) % 3), f"a {blue} {shape} on {ground} background",
            )  # fmt: skip


def write_drawings(folder: Path) -> int:
    """Writes every drawing as a PNG with a caption beside it. Returns how many. Raises OutputError."""
    count = 0
    for drawing in drawings():
        picture = _png(drawing)
        caption = drawing.caption.encode()
        write_durably(folder / f"{drawing.name}.png", [picture], len(picture))
        write_durably(folder / f"{drawing.name}.txt", [caption], len(caption))
        count += 1
    return count


def _png(d: Drawing) -> bytes:
    from PIL import Image, ImageDraw

    large = (d.size[0] * _FINER, d.size[1] * _FINER)
    image = Image.new("RGB", large, d.background)
    _shape(ImageDraw.Draw(image), d, large)
    buffer = io.BytesIO()
    image.resize(d.size, Image.Resampling.BOX).save(buffer, "PNG")
    return buffer.getvalue()


def _shape(draw: ImageDraw, d: Drawing, size: tuple[int, int]) -> None:
    """A circle, or a polygon whose corners lie on one, in the middle."""
    x, y, r = size[0] / 2, size[1] / 2, d.radius * min(size)
    if d.corners == 0:
        draw.ellipse((x - r, y - r, x + r, y + r), fill=d.colour)
        return
    first = math.pi / 4 if d.corners == 4 else -math.pi / 2  # a square stands on its side, a triangle's tip is up
    turns = [first + 2 * math.pi * i / d.corners for i in range(d.corners)]
    reach = r * 1.2  # the corners stand out, so that areas are alike
    draw.polygon([(x + reach * math.cos(a), y + reach * math.sin(a)) for a in turns], fill=d.colour)
