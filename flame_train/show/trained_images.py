"""The images of a run: `dataset.json` and `images.json` joined, and the sheets of their thumbnails."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from flame_train.data.clip_reader import ClipReader
from flame_train.data.grid import Pixels, grid, png
from flame_train.data.images import load_image
from flame_train.data.samples import Sample
from flame_train.data.views import clip_readers
from flame_train.errors import FlameError, shown
from flame_train.io.json_values import json_tree, number, rows, table, text, whole
from flame_train.io.runfolder import RunFolder

from .grids import size_of

_LOG = logging.getLogger(__name__)

SHEET: Final = "dataset.jpg"
_QUALITY: Final = 80
_GREY: Final = (128, 128, 128)
_MASKED: Final = 0.3  # of its light is left to what a mask leaves out
_SLOW_S: Final = 5.0
_HEAD: Final = 4096  # bytes at the beginning of the file, its comment among them


def write_sheet(folder: RunFolder, samples: Sequence[Sample]) -> None:
    """Writes the sheet into a run's folder, unless the one there is of these images. What fails costs a warning."""
    some = [samples[number] for number in with_thumbnail(len(samples))]
    identity = "\n".join(f"{s.item.key} {s.item.sha256} {s.item.mask.sha256 if s.item.mask else ''}" for s in some)
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    place = folder.place(folder.folder / SHEET)
    try:
        if digest.encode() in place.folder.read(SHEET, _HEAD):
            return
    except OSError:
        pass  # there is none yet
    try:
        raw = sheet_of(some, digest)
    except Exception as error:
        _LOG.warning("no %s: %s: %s", SHEET, type(error).__name__, error)
        return
    folder.write_report(SHEET, raw)


def sheet_of(some: Sequence[Sample], comment: str) -> bytes:
    """Returns the samples as a JPEG, each in its cell; what a mask leaves out is dark. `comment` stands in its head.

    An image that cannot be read any more is grey: the cache may have what training needs of it.
    """
    begin = time.monotonic()
    rows = -(-len(some) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL, max(rows, 1) * CELL), _GREY)
    with ThreadPoolExecutor(4) as threads:
        readers = clip_readers(sample.seen(0) for sample in some)
        for number, small in enumerate(threads.map(_thumbnail, readers, some, range(len(some)))):
            if small is not None:
                sheet.paste(small, cell_of(number, some[number].item.size)[:2])
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=_QUALITY, comment=comment)
    if (took := time.monotonic() - begin) > _SLOW_S:
        _LOG.info("%s took %.0f s: the images lie on a slow disk, or are large", SHEET, took)
    return buffer.getvalue()


def sheet_of_some(sheet: bytes, images: Sequence[TrainedImage]) -> tuple[bytes, list[TrainedImage]]:
    """Returns a sheet, made of another, of some images alone, and these with their cells in it. Raises OSError."""
    numbers = {image.cell: number for number, image in enumerate(images) if image.cell is not None}
    made = Image.new("RGB", (COLUMNS * CELL, max(-(-len(images) // COLUMNS), 1) * CELL), _GREY)
    try:
        with Image.open(io.BytesIO(sheet), formats=["JPEG"]) as whole:
            for cell, number in numbers.items():
                made.paste(whole.crop(cell_of(cell, (1, 1))), cell_of(number, (1, 1))[:2])
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"no sheet: {error}") from error
    buffer = io.BytesIO()
    made.save(buffer, "JPEG", quality=_QUALITY)
    cells = [None if image.cell is None else numbers[image.cell] for image in images]
    return buffer.getvalue(), [replace(image, cell=cell) for image, cell in zip(images, cells, strict=True)]


def _thumbnail(reader: ClipReader | None, sample: Sample, number: int) -> Image.Image | None:
    left, top, right, bottom = cell_of(number, sample.item.size)
    size = right - left, bottom - top
    try:
        pixels = sample.seen(0).picture(reader)
        small = Image.fromarray(pixels).resize(size, Image.Resampling.BOX)
        if sample.item.mask is not None:
            mask = Image.fromarray(sample.item.mask.read()).resize(size, Image.Resampling.BOX)
            light = _MASKED + (1.0 - _MASKED) * np.asarray(mask, np.float32)[..., None] / 255.0
            small = Image.fromarray((np.asarray(small) * light).astype(np.uint8))
    except (FlameError, OSError):
        return None
    return small


CONTROLS: Final = "controls.png"
SIDE: Final = 320
"""Pixels: the longer side of a control image there."""


def write_controls(folder: RunFolder, images_of: Sequence[Sequence[Path]]) -> None:
    """Writes the control images of each prompt, given by their files, if any; what fails costs a warning."""
    if not any(images_of):
        return
    try:
        raw = png(grid([_beside(controls) for controls in images_of]))
    except Exception as error:
        _LOG.warning("no %s: %s: %s", CONTROLS, type(error).__name__, error)
        return
    folder.write_report(CONTROLS, raw)


def _beside(controls: Sequence[Path]) -> Pixels:
    """Puts a prompt's control images beside each other, as high as the first; one white pixel where it has none."""
    small: list[Pixels] = []
    for control in controls:
        image = Image.fromarray(load_image(control)[0])
        image.thumbnail((SIDE, SIDE))
        if small:
            image = image.resize((max(image.width * small[0].shape[0] // image.height, 1), small[0].shape[0]))
        small.append(np.asarray(image))
    return np.concatenate(small, axis=1) if small else np.full((1, 1, 3), 255, np.uint8)


CELL: Final = 96  # pixels: the longer side of a thumbnail
COLUMNS: Final = 12
MOST: Final = 480
"""Images of a dataset that have a thumbnail; of more, so many evenly spread."""

Box = tuple[int, int, int, int]
Pair = tuple[int, int]
_SIZE: Final = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class TrainedImage:
    """An image of the dataset. Sizes are (height, width) in pixels; `crop` is (top, left) of the resized image.

    `trained_as` is its name in `images.json`, without its set where one set alone is trained on.
    `loss` is its running loss relative to others at the same noise levels, `seen` how often it came; None: not kept.
    `cell` is the number of its thumbnail.
    """

    name: str
    trained_as: str
    original: Pair
    resized: Pair
    bucket: Pair
    crop: Pair
    kept: float
    captions: tuple[str, ...]
    mask: str
    held_out: bool
    loss: float | None
    seen: int | None
    cell: int | None

    @property
    def thumbnail(self) -> Box | None:
        """Left, top, right and bottom of its thumbnail in the sheet; None: it has none."""
        return None if self.cell is None else cell_of(self.cell, self.original)

    @property
    def cropped(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of the crop, as shares of the image."""
        (height, width), (rows, columns), (top, left) = self.resized, self.bucket, self.crop
        return left / width, top / height, columns / width, rows / height


@dataclass(frozen=True, slots=True)
class Band:
    """The mean loss of a band of timesteps, and how many samples it is of."""

    levels: str
    loss: float
    samples: int


def cell_of(number: int, size: Pair) -> Box:
    """Returns where the thumbnail of an image (height, width) lies in the sheet: left, top, right, bottom."""
    top, left = (place * CELL for place in divmod(number, COLUMNS))
    height, width = (max(round(side * CELL / max(size)), 1) for side in size)
    return left, top, left + width, top + height


def with_thumbnail(count: int, most: int = MOST) -> tuple[int, ...]:
    """Returns the numbers of the images, of `count`, that have a thumbnail, in the order of the sheet's cells."""
    return tuple(range(count)) if count <= most else tuple(i * count // most for i in range(most))


def cells_in(sheet: bytes) -> int:
    """Returns how many thumbnails a sheet has room for; 0: it is none. One of more images than that is full."""
    size = size_of(sheet, "JPEG")
    return 0 if size is None else size[0] // CELL * COLUMNS


def images_of(dataset: bytes, room: int) -> tuple[TrainedImage, ...]:
    """Returns the images of a `dataset.json`, in its order. Rows that make no sense are left out.

    `room` is how many thumbnails the sheet holds.
    """
    images, listed = [], rows(json_tree(dataset))
    cells = {place: cell for cell, place in enumerate(with_thumbnail(len(listed), room))}
    trained = {text(row.get("set")) for row in listed if row.get("validation") is not True}
    for place, row in enumerate(listed):
        file = text(row.get("file"))
        name = f"{text(row['set'])}/{file}" if "set" in row else file
        image = _image(name, file if len(trained) == 1 else name, row, cells.get(place))
        if image is not None:
            images.append(image)
    return tuple(images)


def with_losses(images: Sequence[TrainedImage], losses: bytes) -> tuple[TrainedImage, ...]:
    """Returns the images with what an `images.json` says, the highest running loss first, those without one last."""
    by_name = {shown(text(row.get("file"))): row for row in rows(table(json_tree(losses)).get("images"))}
    joined = []
    for image in images:
        row = {} if image.held_out else by_name.get(image.trained_as, {})
        loss, seen = number(row.get("relative_loss")), whole(row.get("seen"))
        joined.append(replace(image, loss=loss, seen=seen))
    return tuple(sorted(joined, key=lambda image: -1.0 if image.loss is None else image.loss, reverse=True))


def bands_of(losses: bytes) -> tuple[Band, ...]:
    """Returns the bands of timesteps of an `images.json` that samples fell into."""
    bands = []
    for row in rows(table(json_tree(losses)).get("bands")):
        levels, loss, samples = row.get("levels"), number(row.get("loss")), whole(row.get("samples"))
        if isinstance(levels, str) and loss is not None and samples:
            bands.append(Band(levels, loss, samples))
    return tuple(bands)


def _image(name: str, trained_as: str, row: Mapping[str, Any], cell: int | None) -> TrainedImage | None:
    original, resized, bucket = (_size(row.get(key)) for key in ("original", "resized", "bucket"))
    crop = _corner(row.get("crop"))
    if original is None or resized is None or bucket is None or crop is None or 0 in (*original, *resized, *bucket):
        return None
    captions = row.get("captions")
    return TrainedImage(
        name=name,
        trained_as=trained_as,
        original=original,
        resized=resized,
        bucket=bucket,
        crop=crop,
        kept=bucket[0] * bucket[1] / (resized[0] * resized[1]),
        captions=tuple(map(text, captions)) if isinstance(captions, list) else (),
        mask=text(row.get("mask")),
        held_out=row.get("validation") is True,
        loss=None,
        seen=None,
        cell=cell,
    )


def _size(value: Any) -> Pair | None:
    """Returns (height, width) of a text WIDTHxHEIGHT."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return (int(match[2]), int(match[1])) if match else None


def _corner(value: Any) -> Pair | None:
    """Returns (top, left) of a crop."""
    top, left = whole(table(value).get("top")), whole(table(value).get("left"))
    return None if top is None or left is None else (top, left)
