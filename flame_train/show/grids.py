"""The sample grids of a run, cut into the images of their prompts."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image

from flame_train.data.grid import places
from flame_train.io.json_values import table, text, whole

_STEP: Final = re.compile(r"step-(\d{6,})\.png")
_LARGEST: Final = 1 << 28  # pixels of a grid: 64 images of 2048 x 2048

Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class GridPrompt:
    """A prompt of the config, with the size of its image where the config says it; 0: the size of its place.

    `has_control` says whether it has control images.
    """

    text: str
    height: int = 0
    width: int = 0
    has_control: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of samples: its step, and left, top, right and bottom of each prompt's image, or of the whole.

    `written` is when, in nanoseconds.
    """

    step: int
    boxes: tuple[Box, ...]
    written: int


def prompts_of(tree: Mapping[str, Any]) -> tuple[GridPrompt, ...]:
    """Returns the prompts of a resolved config."""
    section = table(tree.get("sample"))
    listed = section.get("prompts")
    return tuple(_wanted(prompt, section) for prompt in listed) if isinstance(listed, list) else ()


def _wanted(prompt: Any, section: Mapping[str, Any]) -> GridPrompt:
    if not isinstance(prompt, Mapping):
        prompt = {"text": prompt}
    height, width = (whole(prompt.get(side) or section.get(side)) or 0 for side in ("height", "width"))
    has_control = bool(prompt.get("control", section.get("control")))
    return GridPrompt(text(prompt.get("text")), height, width, has_control)


def step_of_grid(name: str) -> int | None:
    """Returns the step of a grid's file; None: it is no grid."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def cut(step: int, size: tuple[int, int], prompts: tuple[GridPrompt, ...], written: int = 0) -> Grid:
    """Gives the grid of a step, (height, width) in pixels. One that is not of these prompts is one image, the whole."""
    boxes_found = places(size, len(prompts))
    boxes = tuple(
        (left, top, left + min(p.width or width, width), top + min(p.height or height, height))
        for p, (top, left, height, width) in zip(prompts, boxes_found, strict=False)
    )
    return Grid(step, boxes or ((0, 0, size[1], size[0]),), written)


def cut_controls(size: tuple[int, int], prompts: tuple[GridPrompt, ...], written: int = 0) -> Grid | None:
    """Cuts the sheet of control images, (height, width) in pixels, as a grid of step -1; None: of other prompts."""
    sheet = cut(-1, size, tuple(GridPrompt(prompt.text) for prompt in prompts), written)
    return sheet if len(sheet.boxes) == len(prompts) and any(prompt.has_control for prompt in prompts) else None


def size_of(raw: bytes) -> tuple[int, int] | None:
    """Returns (height, width) of an image file by its header; None if it is none, or too large to be shown."""
    try:
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as image:
            width, height = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return (height, width) if height * width <= _LARGEST else None


def cropped(raw: bytes, boxes: Sequence[Box], side: int, kind: str) -> list[bytes]:
    """Cuts parts out of an image file, as JPEGs or PNGs, the longer side of each at most `side`. Raises OSError."""
    try:
        with Image.open(io.BytesIO(raw)) as image:
            whole = image.convert("RGB")
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"no image: {error}") from error
    return [_encoded(whole.crop(box), side, kind) for box in boxes]


def _encoded(part: Image.Image, side: int, kind: str) -> bytes:
    part.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if kind == "JPEG":
        part.save(buffer, kind, quality=80)
    else:
        part.save(buffer, kind, compress_level=1)
    return buffer.getvalue()
