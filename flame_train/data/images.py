"""An image file becomes upright 8-bit sRGB pixels, or a DataError that names file, cause and remedy.

Never a guess: what has no defined colour (floats outside 0..1, LAB, unknown 32-bit ranges) is refused.
Pillow decodes; its known traps are dealt with here and in `image_formats` and `colour`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import PIL
from PIL import Image, ImageOps, UnidentifiedImageError

from flame_train.data import image_formats
from flame_train.data.buckets import Size
from flame_train.data.colour import WHITE, alpha_of, has_alpha, inverted, to_rgb, values_of, white_is_zero
from flame_train.data.file_reading import read_bytes
from flame_train.errors import DataError, OutputError, shown
from flame_train.io.digests import Digests
from flame_train.io.json_values import read_checked, write_checked

MAX_PIXELS = 89_478_485  # Pillow's own bound, at which it only warns: 256 MiB of RGB
MAX_FILE_BYTES = 1 << 30
_DRAFT = 8  # the smallest share of a JPEG's size that its decoder gives at once

Content = Literal["colours", "alpha", "values"]
"""What a file is read for: a picture, its alpha channel, or a mask, whose values are data."""

Facts = tuple[int, int] | tuple[int, int, float]
"""(height, width) in pixels of an image, and behind them the seconds of a clip from its first frame to its last."""

_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The facts about a decoded image. `height` and `width` are those of the upright one."""

    height: int
    width: int
    sha256: str  # of the file's bytes
    notices: tuple[str, ...] = ()
    seconds: float | None = None  # of a clip, from its first frame to its last; None: an image

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.height, self.width


def probe(
    path: Path,
    *,
    name: str | None = None,
    seen: Mapping[str, Facts] | None = None,
    digests: Digests | None = None,
    clip: Callable[[bytes, str], ImageInfo | None] | None = None,
) -> ImageInfo:
    """Returns size and hash of an image, which is read to its end as `load_image` does.

    A JPEG is decoded at an eighth of its size: all its bytes are read, and most of the arithmetic is left out.
    `seen` are the sizes, by hash, of those that need not be decoded again; of such nothing else is known. Those whose
    hash `digests` knows are not even read.

    Args:
        name: what a message calls the file; None: its path.
        seen: what is known of images and clips that were decoded before, by hash.
        digests: the hashes of files that need not be read.
        clip: gives the facts about a clip of its bytes and name, None for an image; None: there are no clips.
    """
    label = name if name is not None else shown(path)
    data = b""

    def hashed() -> str:
        nonlocal data
        data = read_bytes(path, limit=MAX_FILE_BYTES, name=label)
        return hashlib.sha256(data).hexdigest()

    digest = (digests or Digests(None)).of([path], "content", hashed)
    known = seen.get(digest) if seen is not None else None
    if known is not None and (clip is not None or len(known) == 2):
        height, width, *seconds = known
        return ImageInfo(int(height), int(width), digest, seconds=seconds[0] if seconds else None)
    data = data or read_bytes(path, limit=MAX_FILE_BYTES, name=label)
    info = clip(data, label) if clip is not None else None
    return info or _loaded(data, label, small=True)[1]


def load_image(path: Path) -> tuple[np.ndarray[Any, Any], ImageInfo]:
    """Read, check and decode one image: (uint8 pixels (H, W, 3), the facts about it).

    It applies the EXIF orientation, converts an embedded colour profile to sRGB, and scales 16-bit values by 1/257.
    Transparent pixels become white. A file with several frames is refused. Raises DataError.
    """
    label = shown(path)
    return _loaded(read_bytes(path, limit=MAX_FILE_BYTES, name=label), label)


def decode_image(data: bytes, name: str) -> np.ndarray[Any, Any]:
    """Loads as `load_image`, of a file's bytes: uint8 (H, W, 3)."""
    return _loaded(data, name)[0]


def load_alpha(path: Path) -> tuple[np.ndarray[Any, Any], ImageInfo]:
    """Loads as `load_image`, of the alpha channel: uint8 (H, W), 255 where the image has none."""
    label = shown(path)
    return _loaded(read_bytes(path, limit=MAX_FILE_BYTES, name=label), label, "alpha")


def load_mask(path: Path, *, name: str | None = None) -> tuple[np.ndarray[Any, Any], ImageInfo]:
    """Loads as `load_image`, of a mask: uint8 (H, W), its values times its alpha. Raises DataError."""
    label = name if name is not None else shown(path)
    return _loaded(read_bytes(path, limit=MAX_FILE_BYTES, name=label), label, "values")


def alpha_and_orientation(path: Path) -> tuple[bool, int]:
    """Of an image that can be decoded: whether it has an alpha channel, and its EXIF orientation from 1 (upright) to 8.

    Only its header is read. An orientation that cannot be read is 1.
    """
    alpha, facts = False, 1
    try:
        with Image.open(path) as image:
            alpha = has_alpha(image)
            facts = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the EXIF block is untrusted binary of its own
        return alpha, 1
    return alpha, facts if facts in range(1, 9) else 1


def _loaded(
    data: bytes,
    label: str,
    content: Content = "colours",
    small: bool = False,
) -> tuple[np.ndarray[Any, Any], ImageInfo]:
    """Loads as `load_image`, of a file's bytes."""
    if not data:
        raise DataError(f"{label}: the file is empty (zero bytes): copy or download it again")
    format_name = image_formats.sniff(data)
    if format_name not in image_formats.IMAGES:
        raise DataError(f"{label}: {image_formats.refusal(format_name)}")
    if format_name == "PNG":
        image_formats.check_png(data, label)
    _refuse_bomb(image_formats.declared_pixels(data, format_name), label)
    notices: list[str] = []
    try:
        pixels, size = _decode(data, format_name, label, content, notices, small)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{label}: {_bomb_text()}") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{label}: the {format_name} is damaged or of a rare kind that Pillow cannot read: "
            f"download it again or convert it to an 8-bit RGB PNG"
        ) from error
    except Exception as error:  # a decoder fed damaged bytes may raise anything at all
        raise DataError(
            f"{label}: the {format_name} is damaged and cannot be decoded ({error}): copy or download it again"
        ) from error
    info = ImageInfo(*size, hashlib.sha256(data).hexdigest(), tuple(notices))
    return pixels, info


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Silences Pillow's warnings while many files are read: each is judged here and reported by name.

    It changes the process's warning filters, so it belongs around a pool of threads, never inside one.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _decode(
    data: bytes,
    found: str,
    label: str,
    content: Content,
    notices: list[str],
    small: bool,
) -> tuple[np.ndarray[Any, Any], Size]:
    """Decodes an image, with the decoder of the sniffed format only."""
    with Image.open(io.BytesIO(data), formats=[found]) as image:
        _refuse_bomb(image.width * image.height, label)
        # A JPEG that holds more is a phone's photo with a depth map or preview: the first is the photo.
        if found != "JPEG" and getattr(image, "is_animated", False):
            clip = "; clips need a model of video, and data.frames" if found in ("GIF", "WEBP") else ""
            raise DataError(
                f"{label}: expected one image, got several frames or pages ({found}): extract the frame you want{clip}"
            )
        whole = image.size
        if small:
            _draft(image)
        image.load()
        upright = _upright(image, label, notices)
        upright = inverted(upright) if white_is_zero(image) else upright
        width, height = whole if upright.size == image.size else whole[::-1]
        if content == "alpha":
            pixels = alpha_of(upright)
        elif content == "values":
            pixels = values_of(upright, label)
        else:
            pixels = to_rgb(upright, label, WHITE, notices)
        return pixels, (height, width)


def _draft(image: Image.Image) -> None:
    """Has a JPEG decoded at an eighth of its size, if it can still be seen then whether it was turned."""
    wide, high = (-(-side // _DRAFT) for side in image.size)
    if wide != high or image.width == image.height:
        image.draft(None, (max(1, image.width // _DRAFT), max(1, image.height // _DRAFT)))


def _upright(image: Image.Image, label: str, notices: list[str]) -> Image.Image:
    """Apply EXIF orientation 1 to 8. Unreadable EXIF leaves the image as stored, with a notice."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:  # the EXIF block is untrusted binary of its own
        notices.append(f"{label}: its EXIF data is unreadable ({error}): taken as upright")
        return image


def _refuse_bomb(pixels: int, label: str) -> None:
    if pixels > MAX_PIXELS:
        raise DataError(f"{label}: {_bomb_text()}")


def _bomb_text() -> str:
    return f"more than {MAX_PIXELS:,} pixels (a decompression bomb, or far too large): shrink or remove it"


_NAME: Final = "images.json"
_DECODERS: Final = " ".join(
    # the number is raised where `data/images.py`, `data/clips.py` or `data/clip_containers.py` judges otherwise
    ["2 Pillow", PIL.__version__, *(f"{each.name} {each.version}" for each in distributions(name="av"))]
)
_MOST: Final = 1_000_000  # images of all datasets that share a cache


def decoded_images(*folders: Path | None) -> dict[str, Facts]:
    """Returns what is known, by SHA-256 in hex, of images and clips that are remembered in any of the folders."""
    return {name: size for folder in folders if folder is not None for name, size in _decoded(folder).items()}


def _decoded(folder: Path) -> dict[str, Facts]:
    content = read_checked(folder / _NAME)
    try:
        known = content["images"].items() if content["by"] == _DECODERS else ()
        return {name: (h, w, seconds[0]) if seconds else (h, w) for name, (h, w, *seconds) in known}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def remember(folder: Path, images: Mapping[str, Facts]) -> None:
    """Note what is known of images and clips that were decoded.

    A disk without room for that costs the next start its time.
    """
    known = decoded_images(folder)
    if images.items() <= known.items() or not folder.is_dir():
        return
    sizes = {**(known if len(known) + len(images) <= _MOST else {}), **images}
    with contextlib.suppress(OutputError):
        write_checked(folder / _NAME, {"by": _DECODERS, "images": dict(sorted(sizes.items()))})
