"""MakeImages of every kind, upright and in the right colours."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from flame_train.data.images import load_image, load_mask, probe, quiet_decoders
from flame_train.errors import DataError
from tests.data.pixels import read_image

Encode = Callable[..., bytes]
MakeImage = Callable[..., np.ndarray[Any, Any]]

RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)


def write(tmp_path: Path, data: bytes, name: str = "x.png") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def near(actual: Any, expected: Any, tolerance: int) -> bool:
    return bool((np.abs(np.asarray(actual, int) - np.asarray(expected, int)) <= tolerance).all())


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "BMP", "TIFF", "JPEG", "AVIF"])
def test_formats(tmp_path: Path, encode: Encode, image: MakeImage, fmt: str) -> None:
    array = np.kron(image(6, 9), np.ones((8, 8, 1), np.uint8))
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}, "AVIF": {"quality": 95}}
    data = encode(array, fmt, **options.get(fmt, {}))
    pixels, info = load_image(write(tmp_path, data, "x.bin"))
    assert pixels.dtype == np.uint8
    assert near(pixels, array, 0 if fmt in ("PNG", "WEBP", "BMP", "TIFF") else 24)
    assert info.size == (48, 72)
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert probe(tmp_path / "x.bin") == info


CORNERS = np.zeros((16, 24, 3), np.uint8)
CORNERS[:8, :12], CORNERS[:8, 12:], CORNERS[8:, :12], CORNERS[8:, 12:] = RED, GREEN, BLUE, YELLOW
# Where the stored corner lies that must become the upper left one (TIFF 6.0, tag Orientation), and whether
# rows and columns trade places.
STORED = {
    1: CORNERS,
    2: CORNERS[:, ::-1],
    3: CORNERS[::-1, ::-1],
    4: CORNERS[::-1],
    5: CORNERS.transpose(1, 0, 2),
    6: CORNERS.transpose(1, 0, 2)[::-1],
    7: CORNERS.transpose(1, 0, 2)[::-1, ::-1],
    8: CORNERS.transpose(1, 0, 2)[:, ::-1],
}


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, encode: Encode, fmt: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100, "subsampling": 0},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }
    data = encode(np.ascontiguousarray(STORED[orientation]), fmt, exif=exif, **options.get(fmt, {}))
    pixels, info = load_image(write(tmp_path, data))
    assert info.size == (16, 24)
    assert near(pixels, CORNERS, 3)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_impossible_orientation_is_upright(tmp_path: Path, encode: Encode, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(read_image(write(tmp_path, encode(CORNERS, "PNG", exif=exif))), CORNERS)


def test_damaged_exif_is_a_notice_or_upright(tmp_path: Path, encode: Encode) -> None:
    data = encode(CORNERS, "WEBP", lossless=True, exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    with quiet_decoders():
        assert np.array_equal(read_image(write(tmp_path, data)), CORNERS)


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, png: Callable[..., bytes]) -> None:
    values = [0, 1, 128, 129, 255, 256, 257, 32768, 40000, 65278, 65534, 65535]
    data = png(len(values), 1, 16, 0, [struct.pack(f">{len(values)}H", *values)])
    pixels = read_image(write(tmp_path, data))
    assert pixels[0, :, 0].tolist() == [round(v / 257) for v in values]
    assert (pixels[..., 0] == pixels[..., 1]).all()
    assert (pixels[..., 0] == pixels[..., 2]).all()


def test_16_bit_grey_tiff_both_byte_orders(tmp_path: Path, encode: Encode) -> None:
    values = np.array([[0, 257, 40000, 65535]], np.uint16)
    for mode, order in (("I;16", "<u2"), ("I;16B", ">u2")):
        image = Image.frombytes(mode, (4, 1), values.astype(order).tobytes())
        pixels = read_image(write(tmp_path, encode(image, "TIFF")))
        assert pixels[0, :, 1].tolist() == [0, 1, 156, 255]


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (6, 4), (4, 2)])
def test_16_bit_colour_png_within_one_level(
    tmp_path: Path, png: Callable[..., bytes], colour: int, channels: int
) -> None:
    samples = np.array([[0, 300, 40000], [65535, 32768, 1000]], np.uint16)
    if channels == 2:
        samples = samples[:, :1]
    rows = samples if channels == 3 else np.concatenate([samples, np.full((2, 1), 65535, np.uint16)], 1)
    data = png(2, 1, 16, colour, [rows.astype(">u2").tobytes()])
    expected = np.broadcast_to(np.rint(samples / 257), (2, 3))
    assert near(read_image(write(tmp_path, data))[0], expected, 1)


def test_palette_with_transparency(tmp_path: Path, png: Callable[..., bytes]) -> None:
    palette = bytes([*RED, *GREEN, *BLUE])
    data = png(3, 1, 8, 3, [bytes([0, 1, 2])], extra=((b"PLTE", palette), (b"tRNS", bytes([255, 0, 128]))))
    assert read_image(write(tmp_path, data))[0].tolist() == [[255, 0, 0], [255, 255, 255], [127, 127, 255]]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_palette_of_few_bits(tmp_path: Path, png: Callable[..., bytes], depth: int) -> None:
    data = png(2, 1, depth, 3, [bytes([1 << (8 - 2 * depth)])], extra=((b"PLTE", bytes([*RED, *GREEN])),))
    assert read_image(write(tmp_path, data))[0].tolist() == [[255, 0, 0], [0, 255, 0]]


def test_alpha_is_laid_over_white(tmp_path: Path, png: Callable[..., bytes]) -> None:
    rgba = png(3, 1, 8, 6, [bytes([*RED, 255, *GREEN, 0, *BLUE, 51])])
    assert read_image(write(tmp_path, rgba))[0].tolist() == [[255, 0, 0], [255, 255, 255], [204, 204, 255]]
    grey_alpha = png(2, 1, 8, 4, [bytes([0, 255, 0, 0])])
    assert read_image(write(tmp_path, grey_alpha))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize(
    ("depth", "colour", "row", "key"),
    [
        (8, 2, bytes([*RED, *GREEN]), struct.pack(">3H", 255, 0, 0)),
        (8, 0, bytes([7, 9]), struct.pack(">H", 7)),
        (16, 0, struct.pack(">2H", 7, 2313), struct.pack(">H", 7)),
    ],
)
def test_transparent_colour_key(
    tmp_path: Path, png: Callable[..., bytes], depth: int, colour: int, row: bytes, key: bytes
) -> None:
    pixels = read_image(write(tmp_path, png(2, 1, depth, colour, [row], extra=((b"tRNS", key),))))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 1].tolist() == ([0, 255, 0] if colour == 2 else [9, 9, 9])


def test_one_bit_and_grey(tmp_path: Path, png: Callable[..., bytes]) -> None:
    one_bit = png(2, 1, 1, 0, [bytes([0b01000000])])
    assert read_image(write(tmp_path, one_bit))[0].tolist() == [[0, 0, 0], [255, 255, 255]]
    grey = png(2, 1, 8, 0, [bytes([0, 77])])
    assert read_image(write(tmp_path, grey))[0].tolist() == [[0, 0, 0], [77, 77, 77]]


@pytest.mark.parametrize("fmt", ["JPEG", "TIFF"])
def test_cmyk(tmp_path: Path, encode: Encode, fmt: str) -> None:
    inks = np.zeros((32, 64, 4), np.uint8)  # white, then pure cyan, black, half magenta
    inks[:, 16:32, 0], inks[:, 32:48, 3], inks[:, 48:, 1] = 255, 255, 128
    image = Image.frombytes("CMYK", (64, 32), inks.tobytes())
    pixels = read_image(write(tmp_path, encode(image, fmt, **({"quality": 100} if fmt == "JPEG" else {}))))
    row = pixels[16, [8, 24, 40, 56]]
    assert near(row, [[255, 255, 255], [0, 255, 255], [0, 0, 0], [255, 127, 255]], 6)


def test_float_in_unit_range(tmp_path: Path, encode: Encode) -> None:
    image = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    assert read_image(write(tmp_path, encode(image, "TIFF")))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("values", [[0.0, 1.5], [-0.1, 1.0], [0.0, 200.0], [0.0, float("nan")]])
def test_float_outside_is_refused(tmp_path: Path, encode: Encode, values: list[float]) -> None:
    path = write(tmp_path, encode(Image.fromarray(np.array([values], np.float32)), "TIFF"), "f.tif")
    with pytest.raises(DataError, match=r"f\.tif: float pixels must lie in 0\.\.1"):
        read_image(path)


@pytest.mark.parametrize("mode", ["LAB", "I"])
def test_undefined_colour_is_refused(tmp_path: Path, encode: Encode, mode: str) -> None:
    path = write(tmp_path, encode(Image.new(mode, (4, 4)), "TIFF"), "odd.tif")
    with pytest.raises(DataError, match=r"odd\.tif: .*save it as RGB"):
        read_image(path)


def test_colour_profile_is_converted(tmp_path: Path, encode: Encode) -> None:
    linear = _linear_srgb_profile()
    # In a linear-light profile with sRGB's primaries, half the light is sRGB 188 (IEC 61966-2-1).
    pixels = read_image(write(tmp_path, encode(np.full((4, 4, 3), 128, np.uint8), "PNG", icc_profile=linear)))
    assert near(pixels, 188, 2)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert np.array_equal(read_image(write(tmp_path, encode(plain, "PNG", icc_profile=srgb))), plain)


def test_a_colour_profile_of_a_mask_is_not_applied(tmp_path: Path, encode: Encode) -> None:
    stored = np.full((4, 4, 3), 128, np.uint8)
    values, _ = load_mask(write(tmp_path, encode(stored, "PNG", icc_profile=_linear_srgb_profile())))
    assert np.array_equal(values, stored[..., 0])


def _linear_srgb_profile() -> bytes:
    """sRGB's own profile with its three tone curves replaced by straight lines."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for i in range(struct.unpack_from(">I", data, 128)[0]):
        tag, offset, size = struct.unpack_from(">4sII", data, 132 + 12 * i)
        if tag in (b"rTRC", b"gTRC", b"bTRC"):
            data[offset : offset + size] = (b"curv" + bytes(8)).ljust(size, b"\0")
        elif tag == b"desc":
            data[offset : offset + size] = bytes(data[offset : offset + size]).replace(
                "sRGB".encode("utf-16-be"), "line".encode("utf-16-be")
            )
    return bytes(data)


@pytest.mark.parametrize("profile", [b"rubbish", b"\0" * 200])
def test_bad_profile_is_a_notice(tmp_path: Path, encode: Encode, profile: bytes) -> None:
    pixels, info = load_image(write(tmp_path, encode(CORNERS, "PNG", icc_profile=profile)))
    assert np.array_equal(pixels, CORNERS)
    assert "colour profile" in info.notices[0]


def test_extension_may_lie(tmp_path: Path, encode: Encode) -> None:
    assert probe(write(tmp_path, encode(CORNERS, "JPEG"), "A.PNG")).size == (16, 24)


def test_webp_sizes_are_read_as_they_are(tmp_path: Path, encode: Encode, image: MakeImage) -> None:
    """The bomb check before decoding must not refuse honest files, whatever their kind."""
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0"}):
        assert probe(write(tmp_path, encode(image(33, 57), "WEBP", **options))).size == (33, 57)


def test_phone_photo_with_a_second_image_is_a_photo(tmp_path: Path, encode: Encode) -> None:
    data = encode(CORNERS, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))], quality=100)
    pixels = read_image(write(tmp_path, data))
    assert pixels.shape == CORNERS.shape
