"""A folder of images, clips and captions, checked once and whole: an ordered list, or every problem at once.

The order is that of the relative paths' bytes, so it is the same on every machine. Nothing is kept of a
image but its size and the hash of its bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from flame_train.data.caption_files import CAPTION_ENDINGS, CaptionFiles, CaptionRule
from flame_train.data.clips import probe_clip
from flame_train.data.companion_files import Control, ControlFolder, Mask, find_mask, mask_names, masks_in
from flame_train.data.file_names import about_clips, clips_named_as_masks, no_image, of_one_name
from flame_train.data.image_formats import IMAGE_ENDINGS, PICTURE_ENDINGS
from flame_train.data.images import Facts, ImageInfo, alpha_and_orientation, load_alpha, probe, quiet_decoders
from flame_train.data.problems import grouped
from flame_train.data.walk import Listing, list_files, matcher
from flame_train.errors import DataError, counted, shown
from flame_train.io.digests import Digests
from flame_train.progress import progress as reading

MIN_SIDE = 8  # pixels: one latent
MAX_RATIO = 16.0
MAX_REPEATS = 1000  # that a folder's name may ask for: more is a year or a date
_TOGETHER = 16  # images of one task: many that were seen before take less time than a task
_LISTED = 100  # lines of one report; the rest is counted

OnBad = Literal["error", "skip"]
Masks = Literal["off", "files", "alpha"]
Progress = Callable[[int, int], None]  # (images read, images in all)


class DatasetError(DataError):
    """All that is wrong with a dataset. `problems` holds one sentence each, beginning with the file.

    `items` are the images of it with which nothing is wrong, for whoever looks for more that is.
    """

    def __init__(self, folder: Path, problems: Sequence[str], items: Sequence[Item] = ()) -> None:
        self.problems, self.items = tuple(problems), tuple(items)
        message = f"{shown(folder)}: {counted(len(self.problems), 'problem')} in the dataset:"
        super().__init__("\n  ".join([message, *grouped(self.problems, _LISTED)]))


@dataclass(frozen=True, slots=True)
class Item:
    """One image with its captions. Of a hundred thousand each has little: their paths begin with one folder."""

    root: Path
    key: str  # relative posix path; bytes that are not UTF-8 as surrogate escapes
    captions: tuple[str, ...]  # at least one
    size: tuple[int, int]  # (height, width) in pixels, upright
    sha256: str  # of the file's bytes
    plain: bool = False  # decoding it gave nothing to be told
    mask: Mask | None = None
    controls: tuple[Control, ...] = ()
    seconds: float | None = None  # of a clip, from its first frame to its last; None: an image

    @property
    def facts(self) -> Facts:
        """What is remembered of it."""
        return self.size if self.seconds is None else (*self.size, self.seconds)

    @property
    def path(self) -> Path:
        """The file."""
        return self.root / self.key

    @property
    def caption(self) -> str:
        """The first caption."""
        return self.captions[0]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The images of one folder in their fixed order."""

    root: Path
    items: tuple[Item, ...]
    repeats: int = 1  # how often each comes in one epoch
    by_folder: bool = False  # and as often as the folder's name says
    notices: tuple[str, ...] = ()

    @classmethod
    def scan(
        cls,
        path: Path,
        repeats: int = 1,
        *,
        by_folder: bool = False,
        default_caption: str | None = None,
        caption_endings: Sequence[str] = CAPTION_ENDINGS,
        caption_lines: bool = False,
        folder_captions: bool = False,
        group: Sequence[str] = (),
        masks: Masks = "off",
        mask_folder: Path | None = None,
        control: Sequence[Path] = (),
        on_bad: OnBad = "error",
        clips: bool = False,
        progress: Progress | None = None,
        seen: Mapping[str, Facts] | None = None,
        digests: Digests | None = None,
    ) -> Self:
        """Returns the dataset under `path`, subfolders included: every caption, and each image decoded fully.

        Args:
            repeats: how often each image comes in one epoch.
            by_folder: whether images of a folder N_name come N times as often, as in kohya's trainers.
            default_caption: the caption of images that have none; None makes a missing caption a problem.
            caption_endings: endings of caption files.
            caption_lines: whether each line of a caption file is a caption of its own.
            folder_captions: whether images without a caption have their folder's name as one.
            group: endings of names that make a group of images, with captions in common.
            masks: where masks come from: files, or the images' alpha channels.
            mask_folder: the folder of mask files; None: they lie beside the images.
            control: folders of control images, of which each image has one in each.
            on_bad: "skip" leaves out an image with a problem and adds a notice; "error" refuses the dataset.
            clips: whether videos and animations are clips.
            progress: gets the number of images read and their total.
            seen: what is known, by SHA-256, of images and clips that were decoded before and need no decoding.
            digests: hashes of images that need not be read again.

        Raises:
            DatasetError: every problem found.
            DataError: `path` is no folder.
            ValueError: `repeats` is below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        listing = list_files(path)
        rule = CaptionRule(tuple(caption_endings), caption_lines, folder_captions, default_caption, tuple(group))
        beside = [ControlFolder(each) for each in control]
        scan = _Scan(path, listing, rule, masks, mask_folder, beside, clips)
        items = scan.read(progress, seen, digests)
        scan.look_at_folders(by_folder)
        fatal = [*listing.problems, *scan.problems, *([] if on_bad == "skip" else scan.bad)]
        if fatal:
            raise DatasetError(path, fatal, items)
        if not items:
            raise DatasetError(path, [*scan.bad, no_image(listing.files, clips)])
        skipped = [f"left out: {problem}" for problem in grouped(scan.bad)]
        return cls(path, tuple(items), repeats, by_folder, (*listing.notices, *scan.notices, *skipped))

    @property
    def repeats_per_image(self) -> tuple[int, ...]:
        """How often each image comes in one epoch."""
        named = [_named_repeats(item.key) if self.by_folder else None for item in self.items]
        return tuple(self.repeats * (1 if n is None else n) for n in named)


class _Scan:
    """One pass over a listing. `problems` spoil the dataset, `bad` only the image they name."""

    def __init__(
        self,
        root: Path,
        listing: Listing,
        captions: CaptionRule,
        masks: Masks,
        mask_folder: Path | None,
        controls: Sequence[ControlFolder],
        clips: bool,
    ) -> None:
        """Starts without items or problems."""
        self.root, self.files, self._masks = root, listing.files, masks
        self._endings = PICTURE_ENDINGS if clips else IMAGE_ENDINGS
        self._clip = probe_clip if clips else None
        self.problems: list[str] = []
        self.bad: list[str] = []
        self.notices: list[str] = []
        for key, problem in listing.broken.items():
            (self.bad if _ending(key) in self._endings else self.problems).append(problem)
        beside = mask_names(self.files)
        taken = frozenset(beside.values())
        self._controls = controls
        for folder in (mask_folder, *(each.root for each in controls)):
            self.files = _outside(folder, root, self.files)
        wrong = clips_named_as_masks(self.files) if clips else {}
        self.bad += wrong.values()
        not_images = taken | wrong.keys()
        self._images = [key for key in self.files if _ending(key) in self._endings and key not in not_images]
        self._captions = CaptionFiles(root, self.files, frozenset(self._images), captions)
        self._mask_paths = {stem: root / key for stem, key in beside.items()}
        if mask_folder is not None:
            same = matcher(os.path.splitext(key)[0] for key in self._images)
            self._mask_paths = {same(stem): mask_folder / key for stem, key in masks_in(mask_folder).items()}
        self._beside, self._unmasked, self._white = taken, 0, list[Path]()

    def read(self, progress: Progress | None, seen: Mapping[str, Facts] | None, digests: Digests | None) -> list[Item]:
        self.problems.extend(self._captions.problems)
        items = []
        probed = self._probe_all(self.root, self._images, progress, seen, digests)
        beside = self._probe_controls(seen, digests)
        for key, info in probed:
            try:
                controls = self._controls_of(key, beside)
                captions = self._captions.of(key)
                mask = self._mask(key, info) if info is not None else None
            except DataError as error:
                self.bad.append(str(error))
                continue
            if info is not None and controls is not None and self._fits(key, info):
                plain, seconds = not info.notices, info.seconds
                items.append(Item(self.root, key, captions, info.size, info.sha256, plain, mask, controls, seconds))
                self.notices.extend(info.notices)
        self._note_counts()
        return items

    def _mask(self, key: str, info: ImageInfo) -> Mask | None:
        """Returns the image's mask; None if it has none. Raises DataError if that does not fit it."""
        if self._masks == "alpha" and info.seconds is None:
            has_alpha = alpha_and_orientation(self.root / key)[0]
            self._unmasked += not has_alpha
            blank = "white" if not has_alpha else "" if load_alpha(self.root / key)[0].any() else "black"
            return Mask(self.root / key, info.sha256, alpha=True, blank=blank)
        path = self._mask_paths.get(os.path.splitext(key)[0])
        if self._masks != "files" or path is None:
            self._unmasked += 1
            return None
        mask, note = find_mask(path, self.root / key, info.size, shown(key))
        self.notices += [note] if note else []
        self._white += [path] if mask.blank == "white" else []
        return mask

    def _probe_controls(
        self, seen: Mapping[str, Facts] | None, digests: Digests | None
    ) -> list[dict[str, ImageInfo | None]]:
        """Returns the facts about the control images in each folder, by path; None for one that is bad."""
        return [
            dict(self._probe_all(folder.root, folder.keys_for(self._images), None, seen, digests))
            for folder in self._controls
        ]

    def _controls_of(self, key: str, beside: Sequence[Mapping[str, ImageInfo | None]]) -> tuple[Control, ...] | None:
        """Returns the image's control images; None if one is bad. Raises DataError if it lacks one."""
        controls = []
        for folder, known in zip(self._controls, beside, strict=True):
            own = folder.key_for(key)
            info = known[own]
            if info is None:
                return None
            controls.append(Control(folder.root / own, info.sha256, info.size, not info.notices))
        return tuple(controls)

    def _probe_all(
        self,
        root: Path,
        images: Sequence[str],
        progress: Progress | None,
        seen: Mapping[str, Facts] | None,
        digests: Digests | None,
    ) -> list[tuple[str, ImageInfo | None]]:
        """Decode every image, a few at a time; the result's order is the input's."""

        def one(key: str) -> ImageInfo | str:
            try:
                name = shown(key) if root == self.root else f"control image {shown(root / key)}"
                clip = self._clip if root == self.root else None
                return probe(root / key, name=name, seen=seen, digests=digests, clip=clip)
            except DataError as error:
                return str(error)

        def some(keys: Sequence[str]) -> list[ImageInfo | str]:
            return [one(key) for key in keys]

        infos: list[tuple[str, ImageInfo | None]] = []
        pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
        try:
            with quiet_decoders(), reading(f"reading {shown(root.name)}", len(images)) as advance:
                parts = [images[i : i + _TOGETHER] for i in range(0, len(images), _TOGETHER)]
                results = (result for part in pool.map(some, parts) for result in part)
                for done, (key, result) in enumerate(zip(images, results, strict=True), 1):
                    if isinstance(result, str):
                        self.bad.append(result)
                    infos.append((key, None if isinstance(result, str) else result))
                    advance(1)
                    if progress is not None:
                        progress(done, len(images))
        finally:
            pool.shutdown(cancel_futures=True)
        return infos

    def _fits(self, key: str, info: ImageInfo) -> bool:
        short, long = sorted(info.size)
        size = f"{shown(key)}: {info.width}x{info.height} pixels"
        if short < MIN_SIDE:
            self.bad.append(f"{size}: its shorter side must be at least {MIN_SIDE}: remove it")
        elif long > short * MAX_RATIO:
            self.bad.append(f"{size}: longer than {MAX_RATIO:g} times its other side: crop or remove it")
        else:
            return True
        return False

    def look_at_folders(self, by_folder: bool) -> None:
        """Notes folders whose names ask for repeats: that nobody listens, or what cannot be a number of them."""
        repeats = {key.split("/")[0]: n for key in self.files if (n := _named_repeats(key)) is not None}
        if not by_folder and repeats:
            are = counted(len(repeats), "folder is", "folders are")
            self.notices.append(
                f"{are} named as kohya's trainers want them for repeats, e.g. "
                f"{shown(next(iter(repeats)))}: set data.folder_repeats = true to have them here"
            )
        self.problems += [
            f"{shown(folder)}: expected repeats from 1 to {MAX_REPEATS} before the _: rename or move the folder"
            for folder, n in repeats.items()
            if by_folder and not 1 <= n <= MAX_REPEATS
        ]

    def _note_counts(self) -> None:
        self.notices += [*self._captions.notices(), *of_one_name(self._images)]
        if self._masks == "off" and self._beside:
            example = shown(min(self._beside))
            self.notices.append(
                f"{counted(len(self._beside), 'mask is', 'masks are')} passed over, e.g. {example}: "
                'set data.masks = "files" to use them'
            )
        if self._masks != "off" and self._unmasked:
            self.notices.append(f"{counted(self._unmasked, 'image has', 'images have')} no mask: all of it counts")
        if self._white:
            are = counted(len(self._white), "mask is", "masks are")
            self.notices.append(
                f"{are} white all over and changes nothing, e.g. {shown(self._white[0].name)}: white counts, black and "
                "transparent do not"
            )
        known, clips = {*self._images, *self._beside, *self._captions.used}, self._clip is not None
        others = [key for key in self.files if key not in known]
        if others:
            endings = Counter(_ending(key) or "no ending" for key in others).most_common(5)
            kinds = ", ".join(f"{count} {ending}" for ending, count in endings)
            are = counted(len(others), "other file is", "other files are")
            self.notices.append(f"{are} passed over ({kinds}), e.g. {shown(others[0])}{about_clips(others, clips)}")


def _named_repeats(key: str) -> int | None:
    """Returns the repeats in the name of an image's outermost folder, N_name; None without a number."""
    folder, below, _ = key.partition("/")
    number, named, _ = folder.partition("_")
    return int(number) if below and named and number.isascii() and number.isdigit() else None


def _outside(folder: Path | None, root: Path, files: list[str]) -> list[str]:
    """Returns `files` below `root` that do not lie in `folder`."""
    if folder is None or not folder.resolve().is_relative_to(root.resolve()):
        return files
    inside = f"{folder.resolve().relative_to(root.resolve()).as_posix()}/"
    return [key for key in files if not key.startswith(inside)]


def _ending(key: str) -> str:
    return os.path.splitext(key)[1].lower()
