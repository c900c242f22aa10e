"""`dataset.jpg`: a sheet of small images of a run's dataset, which its page shows wherever the folder is copied to."""

from __future__ import annotations

import hashlib
import io
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from PIL import Image

from flame_train.data.images import load_image
from flame_train.data.samples import Sample
from flame_train.errors import FlameError
from flame_train.io.runfolder import RunFolder

from .images import CELL, COLUMNS, cell_of, with_thumbnail

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
    told = "\n".join(f"{s.item.key} {s.item.sha256} {s.item.mask.sha256 if s.item.mask else ''}" for s in some)
    digest = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()
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
    """The samples as a JPEG, each in its cell; what a mask leaves out is dark. `comment` stands in its head.

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
