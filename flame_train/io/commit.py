"""Checkpoints that are whole or absent, whatever kills the process.

A checkpoint is written to `.tmp-<step>-<random>` and each file synced, last `MANIFEST.json` with every size and
SHA-256. Then the folder is synced and renamed to `step-<step>`, and its parent synced. Only then older checkpoints
are pruned, each first renamed to `.del-*` so that a half-deleted one never looks like one. A LoRA that stays of one is
moved out of it before. EncoderInput takes the newest folder whose manifest verifies. There is no pointer to the latest,
because it could name a missing one.

Damage is what does not fit: a size, a hash, a manifest that says something else. A transient read error is no damage.
An older checkpoint in place of the newest would have the newest pruned, so reading ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry, Location, OpenFolder, open_folder, path_of
from flame_train.disk.preflight import disk_errors, free_bytes, reading
from flame_train.disk.system import NONBLOCK, READ_AND_SYNC
from flame_train.errors import OutputError

_LOG = logging.getLogger(__name__)

MANIFEST: Final = "MANIFEST.json"
FORMAT: Final = 1

STATES: Final = 3
"""Checkpoints that stay whole where every LoRA is kept."""

Content = Callable[[FolderEntry], None] | bytes

_STEP: Final = re.compile(r"step-(\d{6,})")
_LEFT: Final = re.compile(r"\.(tmp|del)-\d+-[0-9a-f]{16}")
_LARGEST_MANIFEST: Final = 1 << 20  # bytes; ours have some hundred


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint, and one sentence for each newer folder that failed verification."""

    path: Path
    step: int
    skipped: tuple[str, ...]


def commit(
    root: Location,
    step: int,
    files: Mapping[str, Content],
    keep: int,
    size: int | None = None,
    *,
    spare: Collection[int] = (),
    lora_of: Callable[[int], str] = lambda step: "lora.safetensors",
) -> Path:
    """Writes the checkpoint of `step`, removes all but the newest and those to `spare`; returns its folder.

    A whole checkpoint of that step stays as it is. If the disk refuses, nothing half-written is left.

    Args:
        root: the folder of checkpoints.
        files: name -> the file's bytes, or a function that writes the file at a given path.
        keep: how many of the newest checkpoints stay; 0: `STATES`, and of each older one its LoRA beside them.
        size: bytes of all files together, roughly; None: unknown.
        spare: steps of earlier checkpoints that stay too, if they are there.
        lora_of: the name of the LoRA in the checkpoint of a step.

    Raises:
        OutputError: the disk refuses; older checkpoints stay.
    """
    final = path_of(root) / _name(step)
    known = sum(len(content) for content in files.values() if isinstance(content, bytes))
    needed = size or known or None
    if isinstance(root, FolderEntry):
        root.folder.check()
    with disk_errors(final, needed=needed):
        if isinstance(root, Path):
            root.mkdir(parents=True, exist_ok=True)
        held = root.folder.folder(root.name, make=True) if isinstance(root, FolderEntry) else OpenFolder.open(root)
    with held, held.errors(final, needed=needed):
        held.check()
        there = held.lstat(_name(step)) is not None
        if there and _damage_of(held, _name(step)) is None:
            return final
        if size is not None and free_bytes(held.path) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write_and_rename(held, step, files, there)
        fail_point("checkpoint.before_prune")
        _prune(held, step, _Retention(keep, spare, lora_of))
    return final


def _write_and_rename(root: OpenFolder, step: int, files: Mapping[str, Content], there: bool) -> None:
    """Writes the checkpoint under another name and renames it; removes a damaged one that is `there`."""
    temporary = f".tmp-{step}-{secrets.token_hex(8)}"
    try:
        root.make_folder(temporary)
        with root.folder(temporary) as folder:
            _write(folder, step, files)
        if there:
            _delete(root, step)
        fail_point("checkpoint.before_rename")
        root.check()
        root.rename(temporary, _name(step))
    except BaseException:
        _try_to_remove(root, temporary)
        raise
    fail_point("checkpoint.after_rename")
    root.sync()


def _write(folder: OpenFolder, step: int, files: Mapping[str, Content]) -> None:
    fail_point("checkpoint.begin")
    entries = {}
    for name, content in files.items():
        if isinstance(content, bytes):
            _write_bytes(folder, name, content)
        else:
            content(folder / name)
        fail_point("checkpoint.after_file")
        entries[name] = _fingerprint(folder, name, sync=True)
    fail_point("checkpoint.before_manifest")
    manifest = {"format": FORMAT, "step": step, "files": entries}
    _write_bytes(folder, MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
    _fingerprint(folder, MANIFEST, sync=True)
    fail_point("checkpoint.after_manifest")
    folder.sync()


def _write_bytes(folder: OpenFolder, name: str, content: bytes) -> None:
    with os.fdopen(folder.file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        half = len(content) // 2
        file.write(content[:half])
        file.flush()
        fail_point("checkpoint.mid_file")
        file.write(content[half:])


def _fingerprint(folder: OpenFolder, name: str, *, sync: bool = False) -> dict[str, Any]:
    """Returns size and hash of a file; it syncs the file on request. Raises OSError."""
    flags = READ_AND_SYNC if sync else os.O_RDONLY
    with os.fdopen(folder.file(name, flags | NONBLOCK), "rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


@dataclass(frozen=True, slots=True)
class _Retention:
    """What stays of earlier checkpoints: as the arguments of `commit`."""

    keep: int
    spare: Collection[int]
    lora_of: Callable[[int], str]


def _prune(root: OpenFolder, step: int, staying: _Retention) -> None:
    """Keeps the checkpoint of `step`, the newest before it, and those to `spare`; what cannot be removed stays."""
    earlier = [old for old in _steps(root) if old < step]
    counted = [old for old in earlier if old not in staying.spare]
    spared = [old for old in earlier if old in staying.spare]
    staying_steps = {step, *counted[: (staying.keep or STATES) - 1], *spared}
    for old in _steps(root):
        if old in staying_steps:
            continue
        path = root.path / _name(old)
        try:
            note = "" if staying.keep or old > step else _keep_lora(root, old, staying.lora_of(old))
            _delete(root, old)
            _LOG.info("removed %s: checkpoint.keep = %d%s", path, staying.keep, note)
        except OSError as error:
            _LOG.warning("%s: an old checkpoint that cannot be removed: %s", path, error.strerror or error)


def _keep_lora(root: OpenFolder, step: int, name: str) -> str:
    """Puts a checkpoint's LoRA beside the checkpoints, by a name that has its step. Says where it is."""
    number = f"-{step:06d}"
    stem = name.removesuffix(".safetensors").removesuffix(number)
    with root.folder(_name(step)) as folder:
        if folder.lstat(name) is None:
            return ""
    root.rename(f"{_name(step)}/{name}", f"{stem}{number}.safetensors")
    return f", which keeps its LoRA as {stem}{number}.safetensors"


def _delete(root: OpenFolder, step: int) -> None:
    doomed = f".del-{step}-{secrets.token_hex(8)}"
    root.rename(_name(step), doomed)
    fail_point("checkpoint.mid_prune")
    root.remove(doomed)


def _try_to_remove(root: OpenFolder, name: str) -> None:
    with contextlib.suppress(OSError):  # the next start tries again
        root.remove(name, missing_ok=True)


def remove_stale(root: Location) -> None:
    """Remove what killed processes left half-written or half-deleted. The caller must hold the run's lock."""
    path = path_of(root)
    with reading(path):
        try:
            held = open_folder(root)
        except FileNotFoundError:
            return
        with held:
            for name in filter(_LEFT.fullmatch, held.names()):
                _try_to_remove(held, name)


class NoIntactCheckpoint(OutputError):
    """There are checkpoints, and all of them are damaged."""


def newest(root: Location) -> Checkpoint | None:
    """Returns the newest checkpoint under `root` that verifies, or None where there is none at all.

    Raises:
        NoIntactCheckpoint: there are checkpoints, and none verifies; the message has the reason for each.
        OutputError: a checkpoint has a newer format, or cannot be read at the moment.
    """
    path, damaged = path_of(root), list[str]()
    with reading(path):
        try:
            held = open_folder(root)
        except FileNotFoundError:
            return None
        with held:
            for step in _steps(held):
                name = _name(step)
                with reading(path / name):
                    damage = _damage_of(held, name)
                if damage is None:
                    return Checkpoint(path / name, step, tuple(damaged))
                damaged.append(f"{path / name}: {damage}")
    if not damaged:
        return None
    raise NoIntactCheckpoint(
        "no checkpoint of this run is whole:\n  "
        + "\n  ".join(damaged)
        + "\nrestore one from a backup, or set output.dir to a new folder to start over"
    )


def count(root: Location) -> int:
    """Returns how many checkpoints lie under `root`, whole or not."""
    with reading(path_of(root)):
        try:
            held = open_folder(root)
        except FileNotFoundError:
            return 0
        with held:
            return len(_steps(held))


def is_checkpoint(name: str) -> bool:
    """Tells whether a checkpoint is called so."""
    return _STEP.fullmatch(name) is not None


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(root: OpenFolder) -> list[int]:
    """Returns the step of each checkpoint under `root`, whole or not, newest first. Raises OSError."""
    matches = (_STEP.fullmatch(name) for name in root.names())
    steps = [int(match.group(1)) for match in matches if match and match.group() == _name(int(match.group(1)))]
    return sorted(steps, reverse=True)


def _damage_of(root: OpenFolder, name: str) -> str | None:
    """Finds the damage of the checkpoint `name`; None if it is whole. Raises OSError if that cannot be determined."""
    status = root.lstat(name)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    with root.folder(name) as folder:
        damage = _not_plain(folder, MANIFEST)
        if damage is not None:
            return damage
        return _manifest_damage(folder, name, folder.read(MANIFEST, _LARGEST_MANIFEST))


def _manifest_damage(folder: OpenFolder, name: str, raw: bytes) -> str | None:
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be understood: {error}"
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise OutputError(
            f"{folder.path}: written by a newer flame-train (checkpoint format {version}, this version reads "
            f"{FORMAT}); update flame-train to continue this run"
        )
    entries = manifest.get("files") if version == FORMAT else None
    if not isinstance(entries, dict) or not entries or manifest.get("step") != int(name.removeprefix("step-")):
        return f"{MANIFEST} does not describe this folder"
    damaged = (_file_damage(folder, file, entry) for file, entry in entries.items())
    return next((damage for damage in damaged if damage is not None), None)


def _file_damage(folder: OpenFolder, name: str, entry: Any) -> str | None:
    if not _is_name(name) or not isinstance(entry, dict):
        return f"{MANIFEST} lists {name!r}, which is not a file of this folder"
    damage = _not_plain(folder, name)
    if damage is not None:
        return damage
    status = folder.lstat(name)
    if status is not None and status.st_size != entry.get("size"):  # told before all of it is read: it may have no end
        return f"{name} has {status.st_size} bytes, its manifest says {entry.get('size')!r}"
    actual = _fingerprint(folder, name)
    return None if actual["sha256"] == entry.get("sha256") else f"{name} does not match its SHA-256"


def _is_name(name: str) -> bool:
    """Tells whether a file can have that name: no path to elsewhere, and no name that disks refuse."""
    return (
        name not in ("", ".", "..")
        and os.path.basename(name) == name
        and name.isprintable()
        and len(os.fsencode(name)) < 256
    )


def _not_plain(folder: OpenFolder, name: str) -> str | None:
    """Returns the problem of a checkpoint's file before reading; reading a pipe would block."""
    status = folder.lstat(name)
    if status is None:
        return f"{name} is missing"
    return None if stat.S_ISREG(status.st_mode) else f"{name} is no plain file"
