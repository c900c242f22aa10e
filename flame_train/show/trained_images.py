"""The images of a run: `dataset.json` and `images.json` joined, and where each lies in the sheet of thumbnails."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from flame_train.errors import shown
from flame_train.io.json_values import json_tree, number, rows, table, text, whole

CELL: Final = 96  # pixels: the longer side of a thumbnail
COLUMNS: Final = 12
MOST: Final = 120
"""Images of a dataset that have a thumbnail; of more, so many evenly spread."""

Box = tuple[int, int, int, int]
Pair = tuple[int, int]
_SIZE: Final = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class TrainedImage:
    """An image of the dataset. Sizes are (height, width) in pixels; `crop` is (top, left) of the resized image.

    `loss` is its running loss relative to others at the same noise levels, `seen` how often it came; None: not kept.
    `cell` is the number of its thumbnail.
    """

    name: str
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
    """The mean loss of a band of noise levels, in thousandths, and how many samples it is of."""

    levels: str
    loss: float
    samples: int


def cell_of(number: int, size: Pair) -> Box:
    """Returns where the thumbnail of an image (height, width) lies in the sheet: left, top, right, bottom."""
    top, left = (place * CELL for place in divmod(number, COLUMNS))
    height, width = (max(round(side * CELL / max(size)), 1) for side in size)
    return left, top, left + width, top + height


def with_thumbnail(count: int) -> tuple[int, ...]:
    """Returns the numbers of the images, of `count`, that have a thumbnail, in the order of the sheet's cells."""
    return tuple(range(count)) if count <= MOST else tuple(i * count // MOST for i in range(MOST))


def images_of(dataset: bytes) -> tuple[TrainedImage, ...]:
    """Returns the images of a `dataset.json`, in its order. Rows that make no sense are left out."""
    images, listed = [], rows(json_tree(dataset))
    cells = {place: cell for cell, place in enumerate(with_thumbnail(len(listed)))}
    for place, row in enumerate(listed):
        name = f"{text(row['set'])}/{text(row.get('file'))}" if "set" in row else text(row.get("file"))
        image = _image(name, row, cells.get(place))
        if image is not None:
            images.append(image)
    return tuple(images)


def with_losses(images: Sequence[TrainedImage], losses: bytes, sheet: bool) -> tuple[TrainedImage, ...]:
    """Returns the images with what an `images.json` says of them, the highest running loss first; those without one
    last.

    `sheet` says whether there are thumbnails.
    """
    by_name = {shown(text(row.get("file"))): row for row in rows(table(json_tree(losses)).get("images"))}
    joined = [
        replace(
            image,
            loss=number(by_name[image.name].get("relative_loss")) if image.name in by_name else None,
            seen=whole(by_name[image.name].get("seen")) if image.name in by_name else None,
            cell=image.cell if sheet else None,
        )
        for image in images
    ]
    return tuple(sorted(joined, key=lambda image: -1.0 if image.loss is None else image.loss, reverse=True))


def bands_of(losses: bytes) -> tuple[Band, ...]:
    """Returns the bands of noise levels of an `images.json` that samples fell into."""
    bands = []
    for row in rows(table(json_tree(losses)).get("bands")):
        levels, loss, samples = row.get("levels"), number(row.get("loss")), whole(row.get("samples"))
        if isinstance(levels, str) and loss is not None and samples:
            bands.append(Band(levels, loss, samples))
    return tuple(bands)


def _image(name: str, row: Mapping[str, Any], cell: int | None) -> TrainedImage | None:
    original, resized, bucket = (_size(row.get(key)) for key in ("original", "resized", "bucket"))
    crop = _corner(row.get("crop"))
    if original is None or resized is None or bucket is None or crop is None or 0 in (*original, *resized, *bucket):
        return None
    captions = row.get("captions")
    return TrainedImage(
        name=name,
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
