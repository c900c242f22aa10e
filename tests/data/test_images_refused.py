"""Hostile and broken images are refused by name, unread where they are too large; nothing hangs or crashes."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from flame_train.data.images import MAX_PIXELS, quiet_decoders
from flame_train.errors import DataError
from tests.data.pixels import read_image
from tests.data.test_images import CORNERS, Encode, MakeImage, write


def refused(path: Path, match: str, **options: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_image(path, **options)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "zero bytes"),
        (b"a caption, not an image", "content is text"),
        (b"<!DOCTYPE html><html>", "HTML: .*download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC: .*pillow-heif"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video"),
        (b"\xff\x0a" + bytes(30), "JPEG XL"),
        (b"\x00\x00\x01\x00\x01\x00" + bytes(30), "ICO"),
        (b"<svg xmlns='x'>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (bytes(range(128, 256)), "no known image format"),
        (b"\x89PNG\r\n\x1a\n", "cut short"),
        (b"\xff\xd8\xff\xe0", "damaged"),
        (b"GIF89a", "damaged"),
        (b"RIFF\x04\0\0\0WEBP", "damaged"),
        (b"BM", "damaged"),
        (b"II*\0", "damaged"),
    ],
)
def test_not_a_image(tmp_path: Path, data: bytes, match: str) -> None:
    with quiet_decoders():
        refused(write(tmp_path, data), match)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF"])
def test_half_a_file(tmp_path: Path, encode: Encode, image: MakeImage, fmt: str) -> None:
    data = encode(image(40, 40), fmt)
    with quiet_decoders():
        refused(write(tmp_path, data[: len(data) // 2]), "cut short|damaged")


def test_png_with_its_tail_cut(tmp_path: Path, encode: Encode, image: MakeImage) -> None:
    data = encode(image(40, 40), "PNG")
    for cut in (1, 4, 12, 20, 30):
        refused(write(tmp_path, data[:-cut]), "cut short")


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_png_with_any_byte_changed(tmp_path: Path, data: st.DataObject) -> None:
    """CRCs find every single changed byte; in the signature the format is gone."""
    image = io.BytesIO()
    Image.fromarray(CORNERS).save(image, "PNG")
    whole = bytearray(image.getvalue())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DataError):
        read_image(write(tmp_path, bytes(whole)))


def test_png_image_data_ends_early_under_right_checksums(tmp_path: Path, encode: Encode) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    whole = encode(noise, "PNG")
    at = whole.index(b"IDAT") - 4
    body = whole[at + 8 : at + 8 + int.from_bytes(whole[at : at + 4], "big") // 2]
    chunk = struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))
    refused(write(tmp_path, whole[:at] + chunk + whole[-12:]), "damaged")


def _png_header_only(width: int, height: int, png: Callable[..., bytes]) -> bytes:
    return png(width, height, 8, 2, [bytes(3)])


@pytest.mark.parametrize("side", [9460, 10_000, 50_000, 2**31 - 1])
def test_png_bomb(tmp_path: Path, png: Callable[..., bytes], side: int) -> None:
    assert side * side > MAX_PIXELS
    with quiet_decoders():
        refused(write(tmp_path, _png_header_only(side, side, png)), "decompression bomb")


def test_bombs_of_other_formats(tmp_path: Path, encode: Encode) -> None:
    gif = bytearray(encode(Image.new("P", (4, 4)), "GIF"))
    struct.pack_into("<HH", gif, 6, 60_000, 60_000)
    bmp = bytearray(encode(CORNERS, "BMP"))
    struct.pack_into("<ii", bmp, 18, 40_000, 40_000)
    lossless = bytearray(encode(CORNERS, "WEBP", lossless=True))
    struct.pack_into("<I", lossless, 21, 16_383 | 16_383 << 14)
    lossy = bytearray(encode(CORNERS, "WEBP"))
    struct.pack_into("<HH", lossy, 26, 16_383, 16_383)
    extended = bytearray(encode(Image.new("RGBA", (8, 8), (1, 2, 3, 4)), "WEBP", exif=b"Exif\0\0"))
    assert extended[12:16] == b"VP8X"
    extended[24:30] = (16_382).to_bytes(3, "little") * 2
    with quiet_decoders():
        for data in (gif, bmp, lossless, lossy, extended):
            refused(write(tmp_path, bytes(data)), "decompression bomb")


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animation_is_refused(tmp_path: Path, encode: Encode, fmt: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    options = {"WEBP": {"lossless": True}}.get(fmt, {})
    path = write(tmp_path, encode(frames[0], fmt, save_all=True, append_images=frames[1:], **options))
    refused(path, "several frames or pages")


@pytest.mark.timeout(10)
def test_pipes_devices_folders_and_loops_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    refused(tmp_path / "pipe.png", "a named pipe")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    refused(tmp_path / "zero.png", "a device")
    (tmp_path / "folder.png").mkdir()
    refused(tmp_path / "folder.png", "a folder")
    (tmp_path / "loop.png").symlink_to("loop.png")
    refused(tmp_path / "loop.png", "cannot be read")
    refused(tmp_path / "missing.png", "No such file")


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse.png"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    refused(path, "larger than")


def test_names_are_escaped_in_messages(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"new\nline\x1b[2J\xff.png")
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        read_image(path)
    assert r"new\nline\x1b[2J\xff.png: " in str(caught.value)
    assert str(caught.value).isprintable()


@given(noise=st.binary(max_size=300), magic=st.sampled_from([b"\xff\xd8\xff", b"GIF89a", b"II*\0", b"BM"]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_is_refused_or_decoded_never_a_crash(tmp_path: Path, noise: bytes, magic: bytes) -> None:
    with quiet_decoders(), contextlib.suppress(DataError):
        assert read_image(write(tmp_path, magic + noise)).ndim == 3


def test_checksum_of_hand_made_png_is_right(png: Callable[..., bytes]) -> None:
    """Guards the builder these tests rest on: Pillow itself reads what it makes."""
    data = png(2, 2, 8, 0, [b"\x01\x02", b"\x03\x04"])
    assert np.asarray(Image.open(io.BytesIO(data))).tolist() == [[1, 2], [3, 4]]
    assert data[-4:] == struct.pack(">I", zlib.crc32(b"IEND"))
