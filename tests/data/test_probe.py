"""`probe` decodes fewer pixels than `load_image`, and says the same of every file, whole or damaged."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.data.images import ImageInfo, load_image, probe
from flame_train.errors import DataError


def jpeg(size: tuple[int, int], mode: str = "RGB", orientation: int = 1, **settings: object) -> bytes:
    """Of `size` (width, height), with noise in it so that each block has coefficients."""
    rng = np.random.default_rng(sum(size))
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    exif, raw = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image = Image.fromarray(rng.integers(0, 256, shape, np.uint8), mode)
    image.save(raw, "JPEG", exif=exif, **settings)
    return raw.getvalue()


def verdicts(path: Path, data: bytes) -> tuple[ImageInfo | str, ImageInfo | str]:
    path.write_bytes(data)
    found: list[ImageInfo | str] = []
    for look in (probe, lambda p: load_image(p)[1]):
        try:
            found.append(look(path))
        except DataError as error:
            found.append(str(error))
    return found[0], found[1]


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (8, 8), (65, 64), (64, 65), (200, 120), (121, 200), (15, 17)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_facts_are_those_of_the_whole_image(tmp_path: Path, size: tuple[int, int], orientation: int) -> None:
    small, whole = verdicts(tmp_path / "a.jpg", jpeg(size, orientation=orientation))
    assert small == whole
    assert isinstance(small, ImageInfo)
    assert small.size == (size if orientation in (6, 8) else size[::-1])


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_every_kind_of_jpeg(tmp_path: Path, mode: str, progressive: bool) -> None:
    small, whole = verdicts(tmp_path / "a.jpg", jpeg((90, 60), mode, 6, progressive=progressive, icc_profile=b"no"))
    assert small == whole


@pytest.mark.parametrize("progressive", [False, True])
def test_a_damaged_file_is_refused_as_the_whole_would_be(tmp_path: Path, progressive: bool) -> None:
    data, rng = jpeg((160, 120), progressive=progressive, quality=60), np.random.default_rng(1)
    refused = 0
    for end in rng.integers(2, len(data), 60):
        small, whole = verdicts(tmp_path / "cut.jpg", data[:end])
        assert small == whole
        refused += isinstance(small, str)
    for place in rng.integers(20, len(data), 120):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        small, whole = verdicts(tmp_path / "flipped.jpg", bytes(flipped))
        assert small == whole
        refused += isinstance(small, str)
    assert refused > 50
