"""Which images were decoded before, so that the next start need not decode them again to know that they are whole.

The file has the size of each image by the hash of its bytes: other bytes are another image. Only those are kept that
decoded without a word to say. The file lies in the cache; a damaged one, or one of other decoders, is ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import PIL

from flame_train.data.buckets import Size
from flame_train.errors import OutputError
from flame_train.io.checked_json import read_checked, write_checked

_NAME: Final = "images.json"
_DECODERS: Final = f"1 Pillow {PIL.__version__}"  # the number is raised where `data/images.py` judges otherwise
_MOST: Final = 1_000_000  # images of all datasets that share a cache


def decoded_images(folder: Path) -> dict[str, Size]:
    """(height, width) by SHA-256 in hex, of the remembered images."""
    content = read_checked(folder / _NAME)
    try:
        return {name: (h, w) for name, (h, w) in content["images"].items()} if content["by"] == _DECODERS else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def remember(folder: Path, images: Mapping[str, Size]) -> None:
    """Note the sizes of images that were decoded. A disk without room for that costs the next start its time."""
    known = decoded_images(folder)
    if images.items() <= known.items() or not folder.is_dir():
        return
    sizes = {**(known if len(known) + len(images) <= _MOST else {}), **images}
    with contextlib.suppress(OutputError):
        write_checked(folder / _NAME, {"by": _DECODERS, "images": dict(sorted(sizes.items()))})
