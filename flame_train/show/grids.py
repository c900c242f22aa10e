"""The sample grids of a run, cut into the images of their prompts."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image, ImageSequence

from flame_train.data.clip_files import webp
from flame_train.data.grid import places
from flame_train.data.image_formats import declared_pixels
from flame_train.io.json_values import table, text, whole

_NAME: Final = re.compile(r"step-(\d{6,})(-base)?\.(?:png|webp)")
_LARGEST: Final = 1 << 28  # pixels of a grid: 64 images of 2048 x 2048
_LARGEST_CLIP: Final = 1 << 29  # of all frames: 121 of four clips of 1280 x 704

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

    `written` is when, in nanoseconds. `of_base` is what the base itself drew, where another model draws the others.
    `file` is its name in the folder of samples.
    """

    step: int
    boxes: tuple[Box, ...]
    written: int
    of_base: bool = False
    file: str = ""

    @property
    def label(self) -> str:
        """What the page calls it."""
        return f"step {self.step}, the base" if self.of_base else f"step {self.step}"


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


def step_of_grid(name: str) -> tuple[int, bool] | None:
    """Returns the step of a grid's file, and whether it is of the base; None: it is no grid."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2] is not None) if match else None


def cut(size: tuple[int, int], prompts: tuple[GridPrompt, ...]) -> tuple[Box, ...]:
    """Returns the boxes of a grid, (height, width) in pixels. One that is not of these prompts is one, the whole."""
    boxes = tuple(
        (left, top, left + min(p.width or width, width), top + min(p.height or height, height))
        for p, (top, left, height, width) in zip(prompts, places(size, len(prompts)), strict=False)
    )
    return boxes or ((0, 0, size[1], size[0]),)


def cut_controls(size: tuple[int, int], prompts: tuple[GridPrompt, ...], written: int = 0) -> Grid | None:
    """Cuts the sheet of control images, (height, width) in pixels, as a grid of step -1; None: of other prompts."""
    boxes = cut(size, tuple(GridPrompt(prompt.text) for prompt in prompts))
    return Grid(-1, boxes, written) if len(boxes) == len(prompts) and any(p.has_control for p in prompts) else None


def size_of(raw: bytes, *forms: str) -> tuple[int, int] | None:
    """Returns (height, width) of an image file by its header; None if it is none, or too large to be shown.

    `forms` are the formats that it may have; none: those of samples.
    """
    if declared_pixels(raw, "WEBP") > _LARGEST and raw.startswith(b"RIFF"):
        return None
    try:
        with Image.open(io.BytesIO(raw), formats=forms or ("PNG", "WEBP")) as image:
            (width, height), frames = image.size, getattr(image, "n_frames", 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    fits = height * width <= _LARGEST and height * width * frames <= _LARGEST_CLIP
    return (height, width) if fits else None


def cropped(raw: bytes, boxes: Sequence[Box], side: int, kind: str) -> list[bytes]:
    """Cuts parts out of an image file, as JPEGs or PNGs, the longer side of each at most `side`. Raises OSError.

    Parts of a clip are animated WebPs.
    """
    try:
        with Image.open(io.BytesIO(raw)) as image:
            parts, shown = [list[Image.Image]() for _ in boxes], list[int]()
            for frame in ImageSequence.Iterator(image):
                whole = frame.convert("RGB")  # a WebP's frame has its time once it is decoded
                shown.append(int(whole.info.get("duration", 0)))
                for part, box in zip(parts, boxes, strict=True):
                    part.append(_small(whole.crop(box), side))
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"no image: {error}") from error
    if len(shown) == 1:
        return [_encoded(part[0], kind) for part in parts]
    return [webp([np.asarray(small) for small in part], shown) for part in parts]


def media_type(raw: bytes) -> str:
    """Returns the media type of what `cropped` made."""
    return "image/webp" if raw.startswith(b"RIFF") else "image/png" if raw.startswith(b"\x89PNG") else "image/jpeg"


def _small(part: Image.Image, side: int) -> Image.Image:
    part.thumbnail((side, side), Image.Resampling.LANCZOS)
    return part


def _encoded(part: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "JPEG":
        part.save(buffer, kind, quality=80)
    else:
        part.save(buffer, kind, compress_level=1)
    return buffer.getvalue()
