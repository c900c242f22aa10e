"""Lists a dataset's folder. The walk ends, whatever links, pipes or names it meets.

Links to files and folders are followed, also out of the folder, since people build datasets from links. A
folder reached twice is taken once, under its real place if that lies inside. Hidden names are left out.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flame_train.data.file_reading import special_kind
from flame_train.errors import DataError, shown


def matcher(names: Iterable[str]) -> Callable[[str], str]:
    """Gives a function: a name -> the one of `names` that it equals, or looks like (Unicode's form C); else itself."""
    exact = frozenset(names)
    forms = {_form(name): name for name in exact if not name.isascii()}

    def same(name: str) -> str:
        return name if name in exact or name.isascii() else forms.get(_form(name), name)

    return same


def alike(name: str) -> str:
    """Says what names have in common that differ in case, spaces at an end or forms of letters alone."""
    return unicodedata.normalize("NFKC", name).casefold().strip()


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", name)


@dataclass(slots=True)
class Listing:
    """Relative posix paths of regular files, in byte order, with the skipped entries and the failures.

    `broken` says by path which links lead nowhere: whether that spoils a dataset depends on what they should be.
    """

    files: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)


def list_files(root: Path, setting: str = "data.path") -> Listing:
    """Returns every regular file under `root`, hidden ones excepted.

    Raises DataError, naming the `setting` that chose it, if `root` is no folder.
    """
    listing = Listing()
    seen: set[tuple[int, int]] = set()
    # Linked folders wait until every real one was walked, so that a file's key does not depend on link names.
    real, linked = deque([""]), deque[str]()
    while real or linked:
        folder = real.popleft() if real else linked.popleft()
        _walk_one(root, folder, listing, seen, real, linked, setting)
    listing.files.sort(key=os.fsencode)
    return listing


def _walk_one(
    root: Path,
    folder: str,
    listing: Listing,
    seen: set[tuple[int, int]],
    real: deque[str],
    linked: deque[str],
    setting: str,
) -> None:
    label = shown(folder) or shown(root)
    try:
        status = os.stat(root / folder)
        if (status.st_dev, status.st_ino) in seen:
            listing.notices.append(f"{label}: a link to a folder that was read already: passed over")
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(root / folder) as entries:
            in_order = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if not folder:
            raise DataError(
                f"{label}: expected a folder of images ({reason}): check {setting} and its permissions"
            ) from error
        listing.problems.append(f"{label}: cannot be read ({reason}): check the folder's permissions")
        return
    for entry in in_order:
        if entry.name.startswith("."):
            continue
        _sort_entry(entry, f"{folder}/{entry.name}" if folder else entry.name, listing, real, linked)


def _sort_entry(entry: os.DirEntry[str], key: str, listing: Listing, real: deque[str], linked: deque[str]) -> None:
    try:
        if entry.is_file(follow_symlinks=False):  # which the folder says by itself
            listing.files.append(key)
            return
        mode = entry.stat().st_mode
    except OSError as error:
        reason = error.strerror or type(error).__name__
        listing.broken[key] = f"{shown(key)}: leads nowhere ({reason}): repair or remove the link"
        return
    if stat.S_ISDIR(mode):
        (linked if entry.is_symlink() else real).append(key)
    elif (kind := special_kind(mode)) is not None:
        listing.notices.append(f"{shown(key)}: {kind}: passed over")
    else:
        listing.files.append(key)
