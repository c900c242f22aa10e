"""Views of an image: mirrored, cropped elsewhere, in other colours. Each is encoded once and cached.

Like texts, the views depend on the image and the keys alone, so that runs of other seeds find them encoded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.data.buckets import Placement, resize_and_crop
from flame_train.data.clip_reader import ClipReader
from flame_train.data.images import load_image
from flame_train.data.order import fraction
from flame_train.errors import DataError, shown


@dataclass(frozen=True, slots=True)
class Colours:
    """Factors on brightness, contrast and saturation, and a turn of the hue as a share of the circle."""

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0

    def applied(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """uint8 RGB (H, W, 3) -> the same: brightness, then contrast, saturation and hue, as torchvision's jitter."""
        from PIL import Image, ImageEnhance

        image = Image.fromarray(pixels)
        for enhancer, factor in (
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
            (ImageEnhance.Color, self.saturation),
        ):
            if factor != 1.0:
                image = enhancer(image).enhance(factor)
        if self.hue:
            hue, saturation, value = image.convert("HSV").split()
            turned = np.asarray(hue).astype(np.int16) + round(self.hue * 256)
            hue = Image.fromarray((turned % 256).astype(np.uint8))
            image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
        return np.array(image)


PLAIN = Colours()


@dataclass(frozen=True, slots=True)
class View:
    """One view: `placement` is that of the image before it is mirrored."""

    placement: Placement
    flipped: bool = False
    colours: Colours = PLAIN

    @property
    def seen(self) -> Placement:
        """The placement as SDXL is told it: of a mirrored image, from the other side."""
        p = self.placement
        if not self.flipped:
            return p
        return replace(p, crop_left=p.resized[1] - p.bucket[1] - p.crop_left)

    @property
    def settings(self) -> dict[str, Any]:
        """What the encoded view depends on beside the image, as JSON. Those of a plain view are its geometry."""
        p, c = self.placement, self.colours
        geometry: dict[str, Any] = {
            "resized": list(p.resized),
            "crop": [p.crop_top, p.crop_left],
            "bucket": list(p.bucket),
        }
        if self.flipped:
            geometry["flipped"] = True
        if c != PLAIN:
            geometry["colours"] = [c.brightness, c.contrast, c.saturation, c.hue]
        if p.span is not None:
            geometry["span"] = [p.span.first, p.span.count, p.span.fps]
        return geometry

    def along(self, own: Placement) -> View:
        """Gives the view of a control image with the placement `own`: mirrored, cropped and coloured as this one is."""
        p = self.placement
        top = _share(p.crop_top, p.resized[0] - p.bucket[0], own.resized[0] - own.bucket[0])
        left = _share(p.crop_left, p.resized[1] - p.bucket[1], own.resized[1] - own.bucket[1])
        return replace(self, placement=replace(own, crop_top=top, crop_left=left))

    def pixels(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W, 3) of the image -> uint8 (h, w, 3) of the view."""
        cut = self.cut(image)
        return self.colours.applied(cut) if self.colours != PLAIN else cut

    def cut(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W, 3) or (H, W), an image or its mask, scaled, cropped and mirrored."""
        cut = resize_and_crop(image, self.placement)
        return np.ascontiguousarray(cut[:, ::-1]) if self.flipped else cut


def _share(crop: int, room: int, own: int) -> int:
    """Returns as large a share of the pixels `own` as `crop` is of `room`; half of them where there is no room."""
    return (2 * crop * own + room) // (2 * room) if room else own // 2


@dataclass(frozen=True, slots=True)
class ViewedImage:
    """An image file in one view."""

    path: Path
    sha256: str
    view: View

    def pixels(self, reader: ClipReader | None = None) -> np.ndarray[Any, Any]:
        """Returns uint8 (h, w, 3), or (f, h, w, 3) of a clip, which `reader` reads.

        Raises DataError if the file is another one than the plan has read.
        """
        if (span := self.view.placement.span) is not None:
            return np.stack((reader or ClipReader(self.path, self.sha256)).part(span, self.view.pixels))
        return self.view.pixels(self.picture())

    def picture(self, reader: ClipReader | None = None) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W, 3): the image, or the first frame of the clip. Raises DataError as `pixels`."""
        if (span := self.view.placement.span) is not None:
            reader = reader or ClipReader(self.path, self.sha256)
            return reader.part(replace(span, count=1), lambda frame: frame)[0]
        pixels, info = load_image(self.path)
        if info.sha256 != self.sha256:
            raise DataError(f"{shown(self.path)}: was changed while the dataset was being read; start again")
        return pixels


def clip_readers(images: Iterable[ViewedImage]) -> list[ClipReader | None]:
    """Returns what reads each of these: one reader for all that follow each other of a clip; None for an image.

    Each is to be read once.
    """
    readers, reader, last = list[ClipReader | None](), None, None
    for image in images:
        span = image.view.placement.span
        if span is None:
            readers.append(None)
            continue
        now = (image.path, image.sha256, span.fps), span.first
        if reader is None or last is None or now[0] != last[0] or now[1] < last[1]:
            reader = ClipReader(image.path, image.sha256)
        reader.expect(span)
        readers.append(reader)
        last = now
    return readers


@dataclass(frozen=True, slots=True)
class ViewRule:
    """Which views an image has.

    Attributes:
        flip: whether each view comes mirrored, too.
        random_crop: whether the crop lies anywhere instead of in the centre.
        colours: how far each factor of `Colours` goes from 1, and the hue from 0, in both directions.
        count: how many views there are before mirroring, where crop or colours vary.
    """

    flip: bool = False
    random_crop: bool = False
    colours: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    count: int = 4

    def views(self, placement: Placement, sha256: str) -> tuple[View, ...]:
        """Returns the views of the image with this hash, each once."""
        if not (self.random_crop or any(self.colours)):
            return _uncut_views(placement, self.flip)
        views = dict.fromkeys(self._varied(placement, sha256))
        mirrored = (False, True) if self.flip else (False,)
        return tuple(replace(view, flipped=flipped) for view, flipped in itertools.product(views, mirrored))

    def _varied(self, placement: Placement, sha256: str) -> Iterator[View]:
        for number in range(self.count):
            yield View(self._cropped(placement, sha256, number), colours=self._coloured(sha256, number))

    def _cropped(self, p: Placement, sha256: str, number: int) -> Placement:
        if not self.random_crop:
            return p
        room = (p.resized[0] - p.bucket[0], p.resized[1] - p.bucket[1])
        top, left = (
            int(fraction(f"crop {side} {sha256}", number) * (pixels + 1))
            for side, pixels in zip("yx", room, strict=True)
        )
        return replace(p, crop_top=top, crop_left=left)

    def _coloured(self, sha256: str, number: int) -> Colours:
        """Returns the colours' changes; the first is the image's own."""
        if not number:
            return PLAIN
        drawn = [
            round((2.0 * fraction(f"colour {part} {sha256}", number) - 1.0) * reach, 4)
            for part, reach in enumerate(self.colours)
        ]
        return Colours(1.0 + drawn[0], 1.0 + drawn[1], 1.0 + drawn[2], drawn[3])


@functools.lru_cache(maxsize=10_000)
def _uncut_views(placement: Placement, flip: bool) -> tuple[View, ...]:
    """Gives the views of all images with this placement, where nothing but the side varies: large datasets have few."""
    return tuple(View(placement, flipped) for flipped in ((False, True) if flip else (False,)))
