"""Finds the captions of a dataset's images: in text files beside them, or in a metadata file of their folder."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flame_train.data.caption_formats import METADATA_NAMES, Entry, hidden, read_captions, read_metadata
from flame_train.data.walk import alike, matcher
from flame_train.errors import DataError, counted, shown

CAPTION_ENDINGS = (".txt", ".caption")
_NUMBERED = re.compile(r"(.+)\.(\d{1,4})")


@dataclass(frozen=True, slots=True)
class CaptionRule:
    """Where captions come from.

    Attributes:
        endings: endings of caption files, the first for messages.
        lines: whether each line of a file is a caption of its own.
        folder_name: whether an image without a caption has its folder's name as one.
        default: the caption of images that have none; None makes a missing caption a problem.
        group: endings of names that make a group of images, such as win and lose: NAME.win.png may have NAME.txt.
    """

    endings: tuple[str, ...] = CAPTION_ENDINGS
    lines: bool = False
    folder_name: bool = False
    default: str | None = None
    group: tuple[str, ...] = ()


class CaptionFiles:
    """The captions in a listing. `problems` spoil the dataset."""

    def __init__(self, root: Path, files: Sequence[str], images: Collection[str], rule: CaptionRule) -> None:
        """Reads the metadata files.

        Args:
            root: the folder that is read.
            files: its files, as relative posix paths.
            images: those of them that are images.
            rule: where captions come from.
        """
        self._root, self._files, self._names, self._rule = root, files, frozenset(files), rule
        self._stems = {os.path.splitext(key)[0]: key for key in images}
        self._same, self._same_key = matcher(self._stems), matcher(images)
        self.problems: list[str] = []
        self._texts = self._text_files(rule.endings)
        self._others = self._text_files([e for e in CAPTION_ENDINGS if e not in rule.endings])
        self._used: set[str] = set()
        self._metadata = [self._read(key, images) for key in files if posixpath.basename(key) in METADATA_NAMES]
        self._empty = self._defaulted = self._named = self._elsewhere = 0
        self._hidden: list[str] = []

    def of(self, key: str) -> tuple[str, ...]:
        """Returns the captions of an image, at least one. Raises DataError."""
        by_file = self.written(key)
        if len(set(by_file.values())) > 1:
            raise DataError(f"{shown(key)}: {', '.join(map(shown, by_file))} differ: keep one caption")
        if not by_file:
            return (self._fallback(key, os.path.splitext(key)[0]),)
        captions = next(iter(by_file.values()))
        self._empty += captions == ("",)
        if unseen := next(filter(None, map(hidden, captions)), ""):
            self._hidden.append(f"{shown(next(iter(by_file)))}: {unseen}")
        return captions

    def written(self, key: str) -> dict[str, tuple[str, ...]]:
        """Returns the captions of an image by the file that has them; empty if none has. Raises DataError."""
        stem = os.path.splitext(key)[0]
        by_file = self._written(self._texts.get(stem, {}))
        for source, entries in self._metadata:
            if key in entries:
                by_file[source] = (entries[key].caption,)
        if not by_file and (of_group := self._group_stem(stem)):
            by_file = self._written(self._texts.get(of_group, {}))
        if not by_file:
            others = self._written(self._others.get(stem, {}))
            by_file = dict(list(others.items())[:1])
            self._elsewhere += bool(others)
        return by_file

    def _group_stem(self, stem: str) -> str:
        """Returns the name that an image has in common with its group; "" for one of no group."""
        name, _, ending = stem.rpartition(".")
        return name if ending in self._rule.group else ""

    def _written(self, by_ending: dict[str, list[tuple[int, str]]]) -> dict[str, tuple[str, ...]]:
        """Returns the captions in text files by the file's name, or that of the first of numbered ones."""
        captions = {}
        for numbered in by_ending.values():
            keys = [key for _, key in sorted(numbered)]
            self._used.update(keys)
            parts = [read_captions(f"{self._root}{os.sep}{key}", shown(key), lines=self._rule.lines) for key in keys]
            captions[keys[0]] = tuple(caption for part in parts for caption in part)
        return captions

    def _fallback(self, key: str, stem: str) -> str:
        folder = posixpath.basename(posixpath.dirname(key)) or self._root.resolve().name
        if self._rule.folder_name:
            self._named += 1
            return re.sub(r"^\d+_", "", folder)
        if self._rule.default is None:
            expected = f"{shown(os.path.basename(stem))}{self._rule.endings[0]}"
            near = next((found for name in (key, stem) if (found := self._near.get(alike(name)))), "")
            raise DataError(
                f"{shown(key)}: has no caption: "
                + (f"rename {shown(near)} to {expected}" if near else f"write {expected} in the same folder")
                + ", or set data.caption"
            )
        self._defaulted += 1
        return self._rule.default

    @cached_property
    def _near(self) -> dict[str, str]:
        """Caption files by the name without its ending, as names look: of a.jpg, a.jpg.txt and A.txt are two."""
        return {alike(os.path.splitext(key)[0]): key for key in self._files if key.endswith(self._rule.endings)}

    def _text_files(self, endings: Sequence[str]) -> dict[str, dict[str, list[tuple[int, str]]]]:
        """Finds by path without ending, then ending, the (number, file) of captions; NAME.1.txt is more of NAME."""
        texts: dict[str, dict[str, list[tuple[int, str]]]] = {}
        for key in self._files:
            for ending in endings:
                if key[-len(ending) :].lower() == ending.lower():
                    stem, number = self._same(key[: -len(ending)]), 0
                    match = _NUMBERED.fullmatch(stem)
                    if stem not in self._stems and match and (of := self._same(match[1])) in self._stems:
                        stem, number = of, int(match[2])
                    texts.setdefault(stem, {}).setdefault(ending, []).append((number, key))
        return texts

    def _read(self, key: str, images: Collection[str]) -> tuple[str, dict[str, Entry]]:
        """Returns the entries of a metadata file, by image; its paths begin in its folder."""
        metadata = read_metadata(self._root / key, shown(key))
        self.problems.extend(metadata.problems)
        self._used.add(key)
        entries = {}
        for name, entry in metadata.entries.items():
            path = posixpath.join(posixpath.dirname(key), name)
            image = same if (same := self._same_key(path)) in images else self._stems.get(self._same(path))
            if image is None:
                line = f":{entry.line}" if entry.line else ""
                self.problems.append(
                    f"{shown(key)}{line}: there is no image {shown(path)}: "
                    f"correct file_name (with / between folders) or remove the line"
                )
            else:
                entries[image] = entry
        return key, entries

    def notices(self) -> list[str]:
        """Says what a user should know, once all captions were asked for."""
        notices = []
        if self._empty:
            notices.append(f"{counted(self._empty, 'caption is', 'captions are')} empty")
        if self._defaulted and self._rule.default:
            notices.append(f"{counted(self._defaulted, 'image')} without a caption: the default one is taken")
        if self._named:
            notices.append(f"{counted(self._named, 'image')} without a caption: the folder's name is taken")
        if self._elsewhere:
            have = counted(self._elsewhere, "caption has", "captions have")
            notices.append(f"{have} another ending than data.caption_extension")
        if self._hidden:
            hold = counted(len(self._hidden), "caption holds", "captions hold")
            notices.append(f"{hold} a character that nobody sees and the model does, e.g. {self._hidden[0]}: remove it")
        orphans = self.orphans
        self._used.update(orphans)
        if orphans:
            notices.append(f"{counted(len(orphans), 'caption file')} without an image, e.g. {shown(orphans[0])}")
        return notices

    @property
    def orphans(self) -> list[str]:
        """The caption files without an image."""
        known = {*self._stems, *map(self._group_stem, self._stems)}
        texts = [by_ending for stem, by_ending in self._texts.items() if stem not in known]
        return [key for by_ending in texts for those in by_ending.values() for _, key in those]

    @property
    def used(self) -> frozenset[str]:
        """The files that were read, or told as captions without an image."""
        return frozenset(self._used) | {
            key for by_ending in self._texts.values() for those in by_ending.values() for _, key in those
        }
