"""The files that belong to an image: its mask, which says where it counts, and its control images.

In a mask white counts; black and what is transparent do not. Control images are looked at while their image is learnt.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.data.image_formats import CLIP_ENDINGS, IMAGE_ENDINGS, IMAGES
from flame_train.data.images import alpha_and_orientation, load_alpha, load_mask
from flame_train.data.walk import list_files, matcher
from flame_train.errors import DataError, shown

_SIDEWAYS = 5  # the first EXIF orientation that exchanges the sides
MASK_ENDINGS = (".mask", "-masklabel")  # of a file's name without its ending: the second is OneTrainer's


@dataclass(frozen=True, slots=True)
class Mask:
    """Where the mask of an image is: a file of its own, or the image's alpha channel.

    `sha256` is the hash of the file's bytes. `blank` is the colour that a file has all over, white or black, if it has;
    an image without an alpha channel is white.
    """

    path: Path
    sha256: str
    alpha: bool = False
    blank: str = ""

    def read(self) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W), 255 where the image counts. Raises DataError if the file is another one now."""
        values, info = (load_alpha if self.alpha else load_mask)(self.path)
        if info.sha256 != self.sha256:
            raise DataError(f"{shown(self.path)}: was changed while the dataset was being read; start again")
        return values


def mask_names(files: Sequence[str]) -> dict[str, str]:
    """Files named as masks of an image among `files`: the image's path without its ending -> the mask."""
    images = {os.path.splitext(key)[0]: key for key in files if _is_image(key)}
    clips = {os.path.splitext(key)[0]: key for key in files if os.path.splitext(key)[1].lower() in CLIP_ENDINGS}
    found, owners = {}, clips | images
    same = matcher(owners)
    for stem, key in images.items():
        for ending in MASK_ENDINGS:
            owner = same(stem.removesuffix(ending)) if stem.endswith(ending) else stem
            if owner != stem and owner in owners:
                found[owner] = key
    return found


def masks_in(folder: Path) -> dict[str, str]:
    """Returns the masks in a folder of masks, named as `mask_names` has them, by their path without ending."""
    masks = {}
    for key in list_files(folder, "data.mask_folder").files:
        stem = os.path.splitext(key)[0]
        if _is_image(key):
            masks[next((stem.removesuffix(end) for end in MASK_ENDINGS if stem.endswith(end)), stem)] = key
    return masks


def find_mask(path: Path, image: Path, size: tuple[int, int], name: str) -> tuple[Mask, str]:
    """Returns the mask in a file, for an `image` (height, width) called `name`, and what is to be told of both.

    Each is turned as its own EXIF orientation says. Raises DataError if the mask does not fit.
    """
    values, info = load_mask(path, name=shown(path.name))
    turned, mask_turned = alpha_and_orientation(image)[1], alpha_and_orientation(path)[1]
    if info.size != size:
        remedy = "make them the same size"
        if turned != mask_turned and info.size == size[::-1]:
            remedy = f"EXIF orientation {turned} turns the image, and {mask_turned} the mask: turn the mask likewise"
        raise DataError(
            f"{shown(path.name)}: a mask of {info.width}x{info.height} pixels for {name} of {size[1]}x{size[0]}: "
            f"{remedy}"
        )
    doubtful = turned != mask_turned and (turned < _SIDEWAYS or size[0] == size[1])
    note = f"{name}: EXIF orientation {turned} turns it, and {mask_turned} its mask: look whether that is so"
    blank = "white" if values.min() == 255 else "black" * (not values.any())
    return Mask(path, info.sha256, blank=blank), note * doubtful


def refuse_black(masks: Iterable[Path]) -> None:
    """Raises DataError, which names each of these masks, of images with which nothing could be learnt."""
    problems = [
        f"{shown(path)}: the mask is black all over, so nothing of the image counts: mend it, remove the image, or "
        "set data.mask_weight"
        for path in dict.fromkeys(masks)
    ]
    if problems:
        raise DataError("\n".join(problems))


def latent_mask(values: np.ndarray[Any, Any], downscale: int) -> np.ndarray[Any, Any]:
    """uint8 (H, W) -> fp32 (H / downscale, W / downscale, 1): the mean, 0 to 1, of the pixels of each latent."""
    height, width = (side // downscale for side in values.shape)
    blocks = values.reshape(height, downscale, width, downscale).astype(np.float32)
    return (blocks.mean(axis=(1, 3), dtype=np.float64) / 255.0).astype(np.float32)[..., None]


def loss_weights(mask: np.ndarray[Any, Any], outside: float, normalize: bool) -> np.ndarray[Any, Any]:
    """Returns the factor on the error of each latent: the mask, at least `outside`; over its own mean with `normalize`.

    So has OneTrainer it, as `unmasked_weight` and `normalize_masked_area_loss`.
    """
    weights = np.maximum(mask, np.float32(outside))
    mean = weights.mean(dtype=np.float64).astype(np.float32)
    return weights / mean if normalize and mean else weights


def _is_image(key: str) -> bool:
    return os.path.splitext(key)[1].lower() in IMAGE_ENDINGS


@dataclass(frozen=True, slots=True)
class Control:
    """A control image: its file, the hash of the file's bytes, and its size (height, width) in pixels, upright."""

    path: Path
    sha256: str
    size: tuple[int, int]
    plain: bool = False  # decoding it gave nothing to be told


class ControlFolder:
    """A folder of control images, which have the names of images but for the ending."""

    def __init__(self, root: Path) -> None:
        """Lists the folder. Raises DataError if there is none."""
        self.root = root
        self._keys: dict[str, list[str]] = {}
        self._clips: dict[str, str] = {}
        for key in list_files(root, "data.control").files:
            stem, ending = os.path.splitext(key)
            if ending.lower() in IMAGE_ENDINGS:
                self._keys.setdefault(stem, []).append(key)
            elif ending.lower() in CLIP_ENDINGS:
                self._clips[stem] = key
        self._same = matcher(self._keys)

    def key_for(self, image: str) -> str:
        """Returns an image's control image, both as paths below their folders. DataError unless there is one."""
        stem = self._same(os.path.splitext(image)[0])
        keys = self._keys.get(stem, [])
        if len(keys) == 1:
            return keys[0]
        if keys:
            raise DataError(
                f"{shown(image)}: expected one control image in {shown(self.root)}, got "
                f"{' and '.join(map(shown, keys))}: remove one"
            )
        got, remedy = "none", "add it"
        if stem in self._clips:
            got, remedy = f"{shown(self._clips[stem])}, a clip", "put a still in its place"
        raise DataError(
            f"{shown(image)}: expected a control image {shown(stem)} ({', '.join(sorted(IMAGES))}) in "
            f"{shown(self.root)}, got {got}: {remedy}, or remove the image"
        )

    def keys_for(self, images: Iterable[str]) -> list[str]:
        """Returns the control images of those images that have one."""
        stems = dict.fromkeys(self._same(os.path.splitext(image)[0]) for image in images)
        return [keys[0] for stem in stems if len(keys := self._keys.get(stem, [])) == 1]
