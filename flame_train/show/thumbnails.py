"""Small images that a run's page shows wherever the folder is copied to: of the dataset, and of control images.

`dataset.jpg` has a cell for each of some images of the dataset, `controls.png` a place for each prompt, as a grid has.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from flame_train.data.grid import Pixels, grid, png
from flame_train.data.images import load_image
from flame_train.data.samples import Sample
from flame_train.errors import FlameError
from flame_train.io.runfolder import RunFolder

from .trained_images import CELL, COLUMNS, cell_of, with_thumbnail

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
        for number, small in enumerate(threads.map(_thumbnail, some, range(len(some)))):
            if small is not None:
                sheet.paste(small, cell_of(number, some[number].item.size)[:2])
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=_QUALITY, comment=comment)
    if (took := time.monotonic() - begin) > _SLOW_S:
        _LOG.info("%s took %.0f s: the images lie on a slow disk, or are large", SHEET, took)
    return buffer.getvalue()


def _thumbnail(sample: Sample, number: int) -> Image.Image | None:
    left, top, right, bottom = cell_of(number, sample.item.size)
    size = right - left, bottom - top
    try:
        pixels, _ = load_image(sample.item.path)
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
