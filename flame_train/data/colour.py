"""Any Pillow mode becomes 8-bit sRGB: alpha, palettes, CMYK, 16-bit, floats and colour profiles.

Ranges: 16-bit grey is divided by 257 and rounded, so 0 and 65535 meet 0 and 255. 16-bit colour PNG reaches
Pillow's decoder as its high bytes, within one level of the same. Floats are 0..1.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from flame_train.errors import DataError

WHITE = (255, 255, 255)
BLACK = (0, 0, 0)

_PROFILE_SPACE = {"RGB": "RGB ", "RGBA": "RGB ", "L": "GRAY", "CMYK": "CMYK"}
_PHOTOMETRIC = 262  # TIFF's tag; 0: white is zero


def to_rgb(
    image: Image.Image, label: str, background: tuple[int, int, int], notices: list[str]
) -> np.ndarray[Any, Any]:
    """Returns uint8 (H, W, 3) sRGB of a decoded image. Raises DataError for a mode without defined colours."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _grey16(image, background)
    if mode == "F":
        return _float_grey(np.asarray(image), label)
    _refuse_colourless(mode, label)
    if has_alpha(image):
        image = image.convert("RGBA")
    elif mode not in ("RGB", "L", "CMYK"):
        image = image.convert("L" if mode == "1" else "RGB")
    image = _to_srgb(image, label, notices)
    if image.mode == "RGBA":
        return _composite(np.asarray(image), background)
    return np.array(image.convert("RGB"))


def alpha_of(image: Image.Image) -> np.ndarray[Any, Any]:
    """Returns uint8 (H, W): the alpha channel of a decoded image, 255 where it has none."""
    key = image.info.get("transparency")
    if image.mode.startswith("I;16") and isinstance(key, int):
        return np.where(np.asarray(image) == key, 0, 255).astype(np.uint8)
    if image.mode.startswith("I;16") or not has_alpha(image):
        return np.full((image.height, image.width), 255, np.uint8)
    return np.array(image.convert("RGBA"))[..., 3]


def values_of(image: Image.Image, label: str) -> np.ndarray[Any, Any]:
    """Returns uint8 (H, W) of a decoded mask: its luma times its alpha, so that what is transparent is black.

    The numbers are data, no colours: a profile is not applied. Raises DataError as `to_rgb`.
    """
    if image.mode.startswith("I;16") or image.mode == "F":
        values = to_rgb(image, label, BLACK, [])[..., 0]
        return np.ascontiguousarray(values)
    _refuse_colourless(image.mode, label)
    if not has_alpha(image):
        return np.array(image.convert("L"))
    image = image.convert("RGBA")
    return _composite(np.asarray(image.convert("LA")), (0,))[..., 0]


def white_is_zero(image: Image.Image) -> bool:
    """Says whether an opened TIFF counts from white, in a mode that Pillow does not turn round: 16 bits, or floats."""
    tags = getattr(image, "tag_v2", {})
    return (image.mode.startswith("I;16") or image.mode == "F") and tags.get(_PHOTOMETRIC) == 0


def inverted(image: Image.Image) -> Image.Image:
    """Returns 16-bit or float grey with black and white exchanged."""
    values = np.asarray(image)
    return Image.fromarray(1.0 - values if image.mode == "F" else 65535 - values)


def _refuse_colourless(mode: str, label: str) -> None:
    if mode in ("LAB", "HSV", "I"):
        raise DataError(f"{label}: pixels of the kind {mode} have no fixed range or colour: save it as RGB")


def has_alpha(image: Image.Image) -> bool:
    """Says whether an opened image says how transparent its pixels are."""
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _grey16(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Returns 16-bit grey: value / 257, rounded. (Pillow's own conversion clips everything above 255 to white.)"""
    values = np.asarray(image).astype(np.uint32)
    grey = ((values + 128) // 257).astype(np.uint8)
    pixels = np.repeat(grey[:, :, None], 3, axis=2)
    key = image.info.get("transparency")
    if isinstance(key, int):
        pixels[values == key] = background
    return pixels


def _float_grey(values: np.ndarray[Any, Any], label: str) -> np.ndarray[Any, Any]:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0.0 and high <= 1.0):  # written so that NaN is refused too
        raise DataError(
            f"{label}: float pixels must lie in 0..1, these lie in {low:g}..{high:g}: save it with 8 or 16 bits"
        )
    grey = np.rint(values.astype(np.float64) * 255.0).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _composite(rgba: np.ndarray[Any, Any], background: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns colour * a + background * (1 - a), rounded, in sRGB values as browsers and editors do."""
    # 16 bits hold every sum: at most 255 * 255 + 127
    colour, alpha = rgba[..., :-1].astype(np.uint16), rgba[..., -1:].astype(np.uint16)
    mixed = colour * alpha + np.asarray(background, np.uint16) * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def _to_srgb(image: Image.Image, label: str, notices: list[str]) -> Image.Image:
    """Convert through an embedded ICC profile. Without one, or with sRGB's own, the values stand."""
    data = image.info.get("icc_profile")
    if not data:
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        if profile.profile.xcolor_space != _PROFILE_SPACE[image.mode]:
            notices.append(f"{label}: its colour profile is for other pixels than it has: ignored")
            return image
        if "sRGB" in (profile.profile.profile_description or ""):
            return image
        output = "RGBA" if image.mode == "RGBA" else "RGB"
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode=output)
    except Exception as error:  # profiles are untrusted binary; the image without one is still an image
        notices.append(f"{label}: its colour profile is damaged ({error}): ignored")
        return image
    return image if converted is None else converted
