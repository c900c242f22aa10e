"""Control images: which files lie beside an image, to be looked at while it is learnt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flame_train.data.same_name import matcher
from flame_train.data.sniff import IMAGE_ENDINGS, IMAGES
from flame_train.data.walk import list_files
from flame_train.errors import DataError, shown


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
        for key in list_files(root, "data.control").files:
            stem, ending = os.path.splitext(key)
            if ending.lower() in IMAGE_ENDINGS:
                self._keys.setdefault(stem, []).append(key)
        self._same = matcher(self._keys)

    def key_for(self, image: str) -> str:
        """The control image of an image, both as paths below their folders. Raises DataError unless there is one."""
        stem = self._same(os.path.splitext(image)[0])
        found = self._keys.get(stem, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                f"{shown(image)}: expected one control image in {shown(self.root)}, got "
                f"{' and '.join(map(shown, found))}: remove one"
            )
        raise DataError(
            f"{shown(image)}: expected a control image {shown(stem)} ({', '.join(sorted(IMAGES))}) in "
            f"{shown(self.root)}, got none: add it, or remove the image"
        )

    def keys_for(self, images: Iterable[str]) -> list[str]:
        """The control images of those images that have one."""
        stems = dict.fromkeys(self._same(os.path.splitext(image)[0]) for image in images)
        return [keys[0] for stem in stems if len(keys := self._keys.get(stem, [])) == 1]
