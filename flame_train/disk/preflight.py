"""Checks of folders and free space before a run, messages for disk errors, and where a user's cache lies."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flame_train.disk.system import FOLDER
from flame_train.errors import ConfigError, OutputError

_MARGIN = 1.2  # a preflight asks for this much more than the expected size
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ELSEWHERE = "set output.dir to another place"
_TEMPORARY = re.compile(r"\..*\.flame-[0-9a-f]{16}\.tmp", re.DOTALL)
_LONGEST = 180  # bytes of the file's own name in a temporary one; a file system takes 255 in all


def temporary_name(name: str) -> str:
    """Makes a new name for what will become `name`. Nobody can guess it, and nobody else gives such names."""
    short = os.fsencode(name)[:_LONGEST].decode("utf-8", "ignore")
    return f".{short}.flame-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Tells whether `temporary_name` gives names like this."""
    return _TEMPORARY.fullmatch(name) is not None


@contextmanager
def disk_errors(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError in the body into an OutputError about `path`, which takes `needed` bytes if known."""
    try:
        yield
    except OSError as error:
        raise OutputError(disk_message(path, needed, error)) from error


@contextmanager
def reading(path: Path, *passed: type[OSError]) -> Iterator[None]:
    """Turn an OSError in the body, which only reads, into an OutputError about `path`; not one that is `passed`."""
    try:
        yield
    except passed:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(
            f"{path}: cannot be read just now ({reason}), so nothing was done with it; see to that, and start again"
        ) from error


def disk_message(path: Path, needed: int | None, error: OSError) -> str:
    """Returns the message for an OSError about `path`."""
    if error.errno in _FULL:
        need = f"needs {size(needed)}, " if needed is not None else ""
        return f"{path}: the disk is full: {need}has {size(free_bytes(path))}; free some space and start again"
    if error.errno == errno.EFBIG:
        need = f" of {size(needed)}" if needed is not None else ""
        return f"{path}: a file{need} is larger than this system or its limits (ulimit -f) allow"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        close = "" if FOLDER is not None else "close the program that has it open, or "
        return f"{path}: cannot be written ({error.strerror}); {close}choose a folder this user may write to"
    if error.errno == errno.ELOOP:
        return f"{path}: cannot be written: expected a plain file, found a link; remove it, or choose another place"
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and (obstacle := _obstacle(path.parent)):
        return f"{path}: cannot be written: expected a folder, but {obstacle}; choose another place"
    return f"{path}: cannot be written: {error.strerror or error}"


def free_bytes(path: Path) -> int:
    """Returns free bytes on the disk that holds `path`, or would hold it once made. Raises OSError."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    return path


def preflight(folder: Path, expected: int, remedy: str = "set output.dir to another disk") -> None:
    """Refuse early: raises OutputError unless the disk of `folder` has 1.2 times `expected` bytes free."""
    with disk_errors(folder):
        available = free_bytes(folder)
    if available < expected * _MARGIN:
        raise OutputError(
            f"{folder}: the disk is too full to start: needs {size(int(expected * _MARGIN))}, "
            f"has {size(available)}; free some space, or {remedy}"
        )


def refuse_place(path: Path, ending: str, force: bool) -> None:
    """Checks the file to write before any work.

    Raises:
        ConfigError: `path` does not end in `ending`.
        OutputError: it is a folder, out of reach or in a read-only folder, or it exists without `force`.
    """
    if path.suffix.lower() != ending:
        raise ConfigError(f"{path}: expected a name ending in {ending}, got {path.suffix or 'no ending'}")
    refuse_folder(path)
    if path.exists() and not force:
        raise OutputError(
            f"{path}: exists already and would be overwritten; choose another name, remove it, or say --force"
        )
    could_make_folder(path.parent, "choose another place")


def refuse_folder(path: Path) -> None:
    """Raises OutputError if `path`, the file to write, is a folder, or in one that cannot be entered."""
    with disk_errors(path):
        if path.is_dir():
            raise OutputError(f"{path}: is a folder; give the name of a file to write")


def is_same_file(one: Path, other: Path) -> bool:
    """Tells whether two names are one file's. Not if either is missing or unreachable: its reader reports that."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def could_make_folder(folder: Path, remedy: str = _ELSEWHERE) -> None:
    """Raises OutputError if `make_folder` would, as far as a check without writing shows."""
    with disk_errors(folder):
        _refuse_obstacle(folder, remedy)
        nearest = _existing(folder)
        disk = os.statvfs(nearest) if hasattr(os, "statvfs") else None
        if disk is not None and not disk.f_blocks:
            raise OutputError(f"{folder}: cannot be made: {nearest} is the system's own and holds no files; {remedy}")
        if disk is not None and disk.f_flag & getattr(os, "ST_RDONLY", 0):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _refuse_obstacle(folder: Path, remedy: str) -> None:
    obstacle = _obstacle(folder)
    if obstacle:
        raise OutputError(f"{folder}: expected a folder, but {obstacle}; {remedy}")


def _obstacle(folder: Path) -> str:
    """Finds the file in place of `folder` or one of its parents; "" if there is none."""
    for part in (folder, *folder.parents):
        if part.is_symlink() and not part.exists():
            return f"{part} is a link to {os.readlink(part)}, which is not there"
        if part.exists() and not part.is_dir():
            return f"{part} is a file"
    return ""


def make_folder(folder: Path, remedy: str = _ELSEWHERE) -> None:
    """Make `folder` and its parents, and prove that it can be written to. Raises OutputError, with `remedy`."""
    with disk_errors(folder):
        _refuse_obstacle(folder, remedy)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / temporary_name("write-probe")
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        probe.unlink()


def size(count: int) -> str:
    """Returns `count` bytes for a reader: `12 B`, `3.4 KiB`, `1.2 GiB`."""
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def user_cache(name: str) -> Path | None:
    """Returns the folder `flame-train/NAME` there, whether it exists or not; None if the user has no home folder."""
    variable = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(variable) if Path(variable).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a container's user without HOME or an entry in the system's table of users
        return None
    return base / "flame-train" / name
