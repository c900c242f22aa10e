"""Masks are data: their values times their alpha, as Pillow reads both, whatever the file format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from flame_train.data.dataset import Dataset, DatasetError
from tests.data.pixels import read_image

SIDE = 16
GREY = np.tile(np.arange(0, 256, 16, dtype=np.uint8), (SIDE, 1))
ALPHA = np.ascontiguousarray(GREY.T)
COLOURS = np.dstack([GREY, ALPHA, GREY[::-1]])


def rgba() -> Image.Image:
    return Image.fromarray(np.dstack([COLOURS, ALPHA]), "RGBA")


def palette() -> Image.Image:
    image = Image.fromarray(GREY // 64, "P")
    image.putpalette([0, 0, 0, 80, 80, 80, 160, 160, 160, 255, 255, 255])
    return image


MASKS = {
    "L.png": (Image.fromarray(GREY), {}),
    "LA.png": (Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(ALPHA))), {}),
    "RGB.png": (Image.fromarray(COLOURS), {}),
    "RGBA.png": (rgba(), {}),
    "RGBA.tif": (rgba(), {}),
    "RGBA.webp": (rgba(), {"lossless": True, "exact": True}),
    "P.gif": (palette(), {"transparency": 3}),
    "P.png": (palette(), {"transparency": bytes([255, 0, 100, 255])}),
    "L-key.png": (Image.fromarray(GREY), {"transparency": 240}),
    "RGB-key.png": (Image.fromarray(COLOURS), {"transparency": (240, 240, 0)}),
    "1.png": (Image.fromarray(GREY > 100), {}),
    "CMYK.tif": (Image.fromarray(COLOURS).convert("CMYK"), {}),
    "L.jpg": (Image.fromarray(GREY), {"quality": 95}),
}


def folder(tmp_path: Path, image: Image.Image | None = None, **saving: object) -> Path:
    (image or Image.new("RGB", (SIDE, SIDE), (9, 99, 200))).save(tmp_path / "a.png", **saving)
    (tmp_path / "a.txt").write_text("a caption")
    return tmp_path


def mask_of(root: Path) -> np.ndarray:
    (item,) = Dataset.scan(root, masks="files").items
    assert item.mask is not None
    return item.mask.read()


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_values_times_its_alpha(tmp_path, name):
    image, saving = MASKS[name]
    path = folder(tmp_path) / f"a.mask{Path(name).suffix}"
    image.save(path, **saving)
    with Image.open(path) as stored:
        luma = np.asarray(stored.convert("RGBA").convert("L")).astype(float)
        transparent = stored.has_transparency_data
        alpha = np.asarray(stored.convert("RGBA"))[..., 3] / 255.0 if transparent else 1.0
    assert transparent == any(part in name for part in ("LA.", "RGBA", "key", "P."))
    assert np.abs(mask_of(tmp_path) - luma * alpha).max() <= 0.5


@pytest.mark.parametrize(
    ("colour", "alpha", "expected"),
    [(255, None, 0.25), (0, None, 0.0), (255, "LA", 0.25)],
    ids=["rembg", "alpha", "LA"],
)
def test_what_is_transparent_is_black(tmp_path, colour, alpha, expected):
    """A box of white on nothing is a quarter of the image; black on nothing is nothing at all."""
    box = np.zeros((SIDE, SIDE), np.uint8)
    box[4:12, 4:12] = 255
    parts = [np.full_like(box, colour)] * (1 if alpha else 3)
    Image.fromarray(np.dstack([*parts, box]), alpha or "RGBA").save(folder(tmp_path) / "a.mask.png")
    assert mask_of(tmp_path).mean() / 255 == expected


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_a_tiff_may_count_from_white(tmp_path, mode):
    """As 8 bits of it, which Pillow turns round itself: white is zero, black the largest."""
    whole = {"I;16": (np.uint16, 65535.0), "F": (np.float32, 1.0)}
    dtype, top = whole[mode]
    stored = (GREY / 255.0 * top).astype(dtype)
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[262] = 0
    Image.fromarray(stored).save(tmp_path / "x.tif", tiffinfo=info)
    Image.fromarray(GREY).save(tmp_path / "y.tif", tiffinfo=info)
    with Image.open(tmp_path / "x.tif") as image:
        assert image.tag_v2[262] == 0
    image, values = read_image(tmp_path / "x.tif"), folder(tmp_path) / "a.mask.tif"
    assert (image[..., 0] == 255 - GREY).all()
    (tmp_path / "x.tif").rename(values)
    (tmp_path / "y.tif").unlink()
    assert (mask_of(tmp_path) == 255 - GREY).all()


def test_the_alpha_of_16_bits_is_a_key(tmp_path):
    values = (GREY.astype(np.uint16)) * 257
    folder(tmp_path, Image.fromarray(values), transparency=int(values[0, 5]))
    (item,) = Dataset.scan(tmp_path, masks="alpha").items
    assert item.mask is not None
    assert (item.mask.read() == np.where(values == values[0, 5], 0, 255)).all()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_mask_is_turned_as_its_image_is(tmp_path, orientation):
    image = Image.fromarray(COLOURS[:8])
    folder(tmp_path, image, exif=turned(orientation))
    image.convert("L").save(tmp_path / "a.mask.png", exif=turned(orientation))
    assert (mask_of(tmp_path) == np.asarray(Image.fromarray(read_image(tmp_path / "a.png")).convert("L"))).all()


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_mask_that_is_not_turned_as_its_image_is_told(tmp_path, orientation):
    image = Image.fromarray(COLOURS[:8])
    folder(tmp_path, image, exif=turned(orientation))
    image.convert("L").save(tmp_path / "a.mask.png")
    if orientation == 6:
        with pytest.raises(DatasetError, match=r"16x8 pixels for a.png of 8x16: EXIF orientation 6 turns the image"):
            Dataset.scan(tmp_path, masks="files")
        Image.new("L", (8, 16), 100).save(tmp_path / "a.mask.png")  # drawn upright, as its size shows
        assert Dataset.scan(tmp_path, masks="files").notices == ()
    else:
        (notice,) = Dataset.scan(tmp_path, masks="files").notices
        assert notice.startswith("a.png: EXIF orientation 3 turns it, and 1 its mask")


def test_a_mask_that_is_white_all_over_is_told(tmp_path):
    Image.new("L", (SIDE, SIDE), 255).save(folder(tmp_path) / "a.mask.png")
    (notice,) = Dataset.scan(tmp_path, masks="files").notices
    assert notice.startswith("1 mask is white all over and changes nothing, e.g. a.mask.png")


def test_images_without_alpha_are_counted(tmp_path):
    folder(tmp_path)
    assert "1 image has no mask: all of it counts" in Dataset.scan(tmp_path, masks="alpha").notices


def test_an_image_that_is_transparent_all_over_has_a_black_mask(tmp_path):
    """Known when images are looked at, so that a plan can refuse it as it refuses a black file."""
    folder(tmp_path, Image.new("RGBA", (SIDE, SIDE), (9, 99, 200, 0)))
    (item,) = Dataset.scan(tmp_path, masks="alpha").items
    assert item.mask is not None
    assert item.mask.blank == "black"
