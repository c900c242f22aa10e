"""The images of a config's folder: each with its bucket, crop, caption, mask and control images; captions written."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

from PIL import Image

from flame_train.config.schema import Config
from flame_train.data.bucketed import parts_of
from flame_train.data.buckets import Placement
from flame_train.data.caption_files import CaptionFiles, CaptionRule
from flame_train.data.caption_formats import MAX_CAPTION_BYTES, METADATA_NAMES, one_line
from flame_train.data.clips import load_still
from flame_train.data.companion_files import Control, Mask
from flame_train.data.dataset import Dataset, Item
from flame_train.data.image_formats import PICTURE_ENDINGS
from flame_train.data.images import decoded_images, load_mask, remember
from flame_train.data.sets import DataSet, image_sets
from flame_train.data.walk import list_files
from flame_train.diffusion.objective_kind import OBJECTIVES
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import user_cache
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError, DataError, shown
from flame_train.io.addresses import local_place
from flame_train.io.digests import Digests
from flame_train.run.plan.encoding import cache_folder
from flame_train.run.plan.read_dataset import bucket_rules

PAGE: Final = 60  # images
_SIDE: Final = 1024  # pixels: the longer side of the largest image that is sent


class Changed(ConfigError):
    """A caption is another one by now; `now` is it."""

    def __init__(self, now: str) -> None:
        super().__init__("the caption was changed meanwhile; look at it, and save yours again if it should stand")
        self.now = now


class Pictures:
    """The images of one set."""

    def __init__(self, config: Config, own: DataSet, roots: Roots) -> None:
        """Reads the folder. Raises ConfigError outside of the roots, DataError where no image can be used."""
        self._config, self._set, self._roots = config, own, roots
        self.folder = roots.place(own.path)
        for folder in (self.folder, *own.control_folders, *([Path(own.mask_folder)] if own.mask_folder else [])):
            roots.refuse_links_out(roots.place(str(folder)))
        remembered, group = user_cache("images"), OBJECTIVES.chosen(config.loss).group
        with Digests(user_cache("digests")) as digests:
            self._dataset = Dataset.scan(
                self.folder,
                default_caption=own.caption,
                caption_endings=(own.caption_extension,),
                caption_lines=own.captions.lines,
                folder_captions=own.captions.folder_name,
                group=group,
                masks=own.masks,
                mask_folder=local_place(own.mask_folder) if own.mask_folder else None,
                control=own.control_folders,
                on_bad="skip",
                clips=bool(own.frames),
                seen=decoded_images(remembered, cache_folder(config.data)),
                digests=digests,
            )
        if remembered is not None:  # so that the plan, which follows each change, decodes none of them again
            remembered.mkdir(parents=True, exist_ok=True)
            remember(remembered, {item.sha256: item.facts for item in self._dataset.items if item.plain})
        keys = [item.key for item in self._dataset.items]
        rule = CaptionRule((own.caption_extension,), own.captions.lines, group=group)
        self._captions = CaptionFiles(self.folder, list_files(self.folder).files, frozenset(keys), rule)
        self._rows = [(item, self._captions.written(item.key)) for item in self._dataset.items]
        self._images_of = Counter(file for _, by_file in self._rows for file in by_file)

    def page(self, number: int, lacking: bool) -> dict[str, Any]:
        """Returns a page of the images, or of those that lack a caption, with the counts of all."""
        without = [row for row in self._rows if not row[1]]
        listed = without if lacking else self._rows
        pages = max(-(-len(listed) // PAGE), 1)
        number = min(max(number, 0), pages - 1)
        return {
            "sets": [one.path for one in image_sets(self._config.data)],
            "count": len(self._rows),
            "without_caption": len(without),
            "captions_without_image": list(map(shown, self._captions.orphans)),
            "notices": [shown(notice) for notice in self._dataset.notices],
            "default_caption": self._set.caption,
            "page": number,
            "pages": pages,
            "images": [self._row(*row) for row in listed[number * PAGE : (number + 1) * PAGE]],
        }

    def _row(self, item: Item, by_file: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        first = next(iter(by_file), "")
        return {
            "file": item.key,
            "image": _seen(item),
            "caption": "\n".join(by_file[first]) if first else "",
            "written_in": first,
            "editable": self._file_for(item.key, by_file) is not None,
            "placements": self._placements(item),
            "mask": None if item.mask is None else _seen(item.mask),
            "controls": list(map(_seen, item.controls)),
        }

    def _placements(self, item: Item) -> list[dict[str, Any]]:
        """Returns bucket, crop and a clip's first part at each resolution; what is too small or short the reason."""
        placed: list[dict[str, Any]] = []
        for rule in bucket_rules(self._config.data, self._set.resolutions):
            try:
                placed.append(_shares(parts_of(item, rule.assign(item.size), self._set.clip_rule)[0]))
            except DataError as error:
                placed.append({"problem": str(error)})
        return placed

    def _file_for(self, key: str, by_file: dict[str, tuple[str, ...]]) -> str | None:
        """Returns the file that an image's caption stands in, or shall; None where it is shared."""
        if not by_file:
            return os.path.splitext(key)[0] + self._set.caption_extension
        first = next(iter(by_file))
        alone = len(by_file) == len(by_file[first]) == 1 == self._images_of[first]
        return first if alone and os.path.basename(first) not in METADATA_NAMES else None

    def write(self, key: str, before: str, caption: str) -> dict[str, str]:
        """Writes an image's caption as a file beside it.

        Args:
            key: the image, as the page has it.
            before: the caption that was changed.
            caption: what stands there now.

        Raises:
            ConfigError: there is no such image, its caption is no file of its own, or the text is none.
            Changed: the caption is another one than `before`.
        """
        if all(item.key != key for item in self._dataset.items):
            raise ConfigError(f"{shown(key)}: expected an image of the folder, and there is none of that name")
        by_file = self._captions.written(key)
        now = "\n".join(next(iter(by_file.values()), ()))
        file = self._file_for(key, by_file)
        if file is None:
            raise ConfigError(f"{shown(key)}: its caption stands in {', '.join(map(shown, by_file))}; change it there")
        if now != before:
            raise Changed(now)
        text = one_line(caption.replace("\r", "\n"))
        try:
            raw = f"{text}\n".encode() if text else b""
        except UnicodeEncodeError:
            raise ConfigError(f"{shown(key)}: expected text, got halves of characters") from None
        if "\0" in text or len(raw) > MAX_CAPTION_BYTES:
            raise ConfigError(f"{shown(key)}: expected a caption of at most {MAX_CAPTION_BYTES:,} bytes, without NUL")
        with self._roots.entry(str(self.folder / file)) as entry:
            write_atomically(entry, [raw], len(raw))
        return {"caption": text, "written_in": file}


def _seen(file: Item | Mask | Control) -> dict[str, str]:
    """Returns a file's path and what tells its content from an older one, which the browser keeps."""
    return {"path": str(file.path), "seen": file.sha256[:16]}


def _shares(p: Placement) -> dict[str, Any]:
    """Returns a placement as the report of a dataset has it, with the crop as shares of the image."""
    (height, width), (rows, columns) = p.resized, p.bucket
    crop = [p.crop_left / width, p.crop_top / height, columns / width, rows / height]
    return p.to_json() | {"shares": [round(each, 4) for each in crop]}


def picture(path: str, side: int, mask: bool, roots: Roots) -> bytes:
    """Returns an image below the roots, or the first frame of a clip, as a JPEG, its longer side at most `side`.

    Raises ConfigError for a place outside of them, DataError for what is no image.
    """
    place = roots.place(path)
    if place.suffix.lower() not in PICTURE_ENDINGS:
        raise ConfigError(f"{shown(place.name)}: expected an image")
    image = Image.fromarray(load_mask(place)[0] if mask else load_still(place))
    side = min(max(side, 1), _SIDE)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
