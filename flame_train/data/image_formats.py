"""Identifies an image file by its bytes: names may be wrong, and some decoders accept damaged files.

`sniff` names the format, and `check_png` finds damage that Pillow would let pass. `declared_pixels` reads the size,
which is checked before a decoder allocates for it.
"""

from __future__ import annotations

import zlib

from flame_train.errors import DataError

IMAGES = frozenset({"PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF"})
IMAGE_ENDINGS = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif"}
    | {".heic", ".heif", ".jxl"}  # not readable, so named in the report rather than passed over
)

VIDEO = "a video or another ISO media file"
WEBM = "WebM or Matroska"
CLIP_ENDINGS = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv"})
"""Of videos; animated WebP and GIF have those of images."""
PICTURE_ENDINGS = IMAGE_ENDINGS | CLIP_ENDINGS

_PNG = b"\x89PNG\r\n\x1a\n"
_MAGIC = (
    (_PNG, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"8BPS", "Photoshop"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1a\x45\xdf\xa3", WEBM),
    (b"version https://git-lfs", "Git LFS pointer"),
)
_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip")  # a MOV file may begin with, instead of its brands
_REMEDY = {
    "HEIC": "convert it to JPEG or PNG (the package pillow-heif can)",
    "JPEG XL": "convert it to JPEG or PNG (the package pillow-jxl-plugin can)",
    "Git LFS pointer": "fetch the real file with `git lfs pull`",
    "HTML": "this is a web page saved in place of the image: download it again",
}


def sniff(data: bytes) -> str:
    """Returns the format's name, from the first bytes: one of IMAGES, another known format, 'text' or 'unknown'."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _iso_media(data)
    if data[4:8] in _QUICKTIME:
        return VIDEO
    head = data[:512].lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return "HTML"
    if head.startswith((b"<svg", b"<?xml")):
        return "SVG or XML"
    return "text" if _is_text(data[:512]) else "unknown"


def refusal(found: str, clip: bool = False) -> str:
    """Says why a file of format `found` cannot be used as an image, or as a clip, and what to do."""
    kind, article, formats = ("clip", "a", "MP4 or WebM") if clip else ("image", "an", "PNG, JPEG, WebP or AVIF")
    remedy = _REMEDY.get(found, f"convert it to {formats}, or remove it")
    what = f"its content is of no known {kind} format" if found == "unknown" else f"its content is {found}"
    return f"expected {article} {kind}, but {what}: {remedy}"


def declared_pixels(data: bytes, found: str) -> int:
    """Pixels a WebP's header announces (its decoder allocates them when opened); 0 for other formats."""
    if found != "WEBP" or len(data) < 30:
        return 0
    chunk = data[12:16]
    if chunk == b"VP8X":
        return (int.from_bytes(data[24:27], "little") + 1) * (int.from_bytes(data[27:30], "little") + 1)
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return (int.from_bytes(data[26:28], "little") & 0x3FFF) * (int.from_bytes(data[28:30], "little") & 0x3FFF)


def check_png(data: bytes, name: str) -> None:
    """Walk every chunk to IEND and check its CRC (PNG specification, section 5); DataError where one fails.

    Pillow stops reading when the image is complete: a file cut after that would pass unseen.
    """
    at, kinds = len(_PNG), set[bytes]()
    while b"IEND" not in kinds:
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if end > len(data):
            raise DataError(f"{name}: the PNG is cut short at byte {len(data):,}: copy or download it again")
        if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            chunk = kind.decode("latin-1") if kind.isalpha() else "unknown"
            raise DataError(
                f"{name}: the PNG is corrupt (bad checksum in its {chunk} chunk at byte {at:,}): "
                f"copy or download it again"
            )
        if not kinds and kind != b"IHDR":
            raise DataError(f"{name}: the PNG does not begin with its header: copy or download it again")
        kinds.add(kind)
        at = end
    if b"IDAT" not in kinds:
        raise DataError(f"{name}: the PNG holds no image data: copy or download it again")


def _iso_media(data: bytes) -> str:
    """Tells AVIF from HEIC, which share a container, by the brands in its first box."""
    end = min(int.from_bytes(data[:4], "big"), len(data), 512)
    brands = {data[8:12]} | {data[i : i + 4] for i in range(16, end - 3, 4)}
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    if brands & {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}:
        return "HEIC"
    return VIDEO


def _is_text(head: bytes) -> bool:
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # a character cut by the slice is still text
            return False
    return bool(head) and not any(byte < 9 or 13 < byte < 32 for byte in head)
