"""Checkpoints that are whole or absent, whatever kills the process.

A checkpoint is written to `.tmp-<step>-<pid>`, each file synced, `MANIFEST.json` with every size and SHA-256
last; the folder is synced, renamed to `step-<step>`, and its parent synced. Only then older checkpoints are
pruned, each first renamed to `.del-*` so that a half-deleted one never looks like one. Reading takes the
newest folder whose manifest verifies. There is no pointer to the latest: it could name what is not there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame_train.errors import OutputError
from flame_train.io.durable import sync_folder
from flame_train.io.failpoint import hit
from flame_train.io.files import disk_errors, free_bytes, sync_file

_LOG = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
FORMAT = 1

Content = Callable[[Path], None] | bytes

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint, and one sentence for each newer folder that failed verification."""

    path: Path
    step: int
    skipped: tuple[str, ...]


def commit(root: Path, step: int, files: Mapping[str, Content], keep: int, size: int | None = None) -> Path:
    """Write the checkpoint of `step` under `root` and prune to the `keep` newest. Returns its folder.

    Each content is the file's bytes, or a function that writes the file at the path it is given; `size` is about
    what they take together, if known. If `step` is already there and whole it is left as it is. Raises OutputError
    when the disk refuses; what was there before stays, and nothing half-written is left behind.
    """
    final = root / f"step-{step:06d}"
    temporary = root / f".tmp-{step}-{os.getpid()}"
    known = sum(len(content) for content in files.values() if isinstance(content, bytes))
    with disk_errors(final, needed=size or known or None):
        root.mkdir(parents=True, exist_ok=True)
        if final.exists() and _flaw(final) is None:
            return final
        if size is not None and free_bytes(root) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            _write(temporary, step, files)
            if final.exists():
                _delete(final)
            hit("checkpoint.before_rename")
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        hit("checkpoint.after_rename")
        sync_folder(root)
        hit("checkpoint.before_prune")
        _prune(root, step, keep)
    return final


def _write(folder: Path, step: int, files: Mapping[str, Content]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hit("checkpoint.begin")
    entries = {}
    for name, content in files.items():
        path = folder / name
        _write_file(path, content)
        sync_file(path)
        hit("checkpoint.after_file")
        entries[name] = _fingerprint(path)
    hit("checkpoint.before_manifest")
    manifest = {"format": FORMAT, "step": step, "files": entries}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sync_file(path)
    hit("checkpoint.after_manifest")
    sync_folder(folder)


def _write_file(path: Path, content: Content) -> None:
    if not isinstance(content, bytes):
        content(path)
        return
    with path.open("wb") as file:
        half = len(content) // 2
        file.write(content[:half])
        file.flush()
        hit("checkpoint.mid_file")
        file.write(content[half:])


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _prune(root: Path, step: int, keep: int) -> None:
    """Keep the checkpoint of `step`, just written, and the newest before it.

    Later steps go as well: had one of them been whole, the run would have continued from it. What cannot be removed,
    as a file that is in use on a network disk, costs its room and a warning: the new checkpoint is safe.
    """
    earlier = [found for found, _ in _checkpoints(root) if found < step]
    kept = {step, *earlier[: keep - 1]}
    for found, path in _checkpoints(root):
        if found not in kept:
            try:
                _delete(path)
            except OSError as error:
                _LOG.warning("%s: an old checkpoint that cannot be removed: %s", path, error.strerror or error)


def _delete(path: Path) -> None:
    doomed = path.with_name(f".del-{path.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    hit("checkpoint.mid_prune")
    _remove(doomed)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a folder, or a link to one that someone moved elsewhere: what lies there is theirs."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def sweep(root: Path) -> None:
    """Remove what killed processes left half-written or half-deleted. The caller must hold the run's lock."""
    for path in _folders(root):
        if path.name.startswith((".tmp-", ".del-")):
            _remove(path, ignore_errors=True)  # the next start tries again


def newest(root: Path) -> Found | None:
    """The newest checkpoint under `root` that verifies, or None where there is none at all.

    Raises OutputError when there are some and none verifies, with the reason for each, or when one was
    written by a newer version of the format.
    """
    flaws: list[str] = []
    for step, path in _checkpoints(root):
        flaw = _flaw(path)
        if flaw is None:
            return Found(path, step, tuple(flaws))
        flaws.append(f"{path}: {flaw}")
    if not flaws:
        return None
    raise OutputError(
        "no checkpoint of this run is whole:\n  "
        + "\n  ".join(flaws)
        + "\nrestore one from a backup, or set output.dir to a new folder to start over"
    )


def count(root: Path) -> int:
    """How many checkpoints lie under `root`, whole or not."""
    return len(_checkpoints(root))


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint under `root`, whole or not, newest first."""
    named = ((_STEP.fullmatch(path.name), path) for path in _folders(root))
    return sorted(((int(match.group(1)), path) for match, path in named if match), reverse=True)


def _folders(root: Path) -> list[Path]:
    """What lies under `root`; nothing if it is no folder. Raises OutputError where that cannot be told."""
    with disk_errors(root):
        return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _flaw(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`, or None if it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise OutputError(
            f"{folder}: written by a newer flame-train (checkpoint format {version}, this version reads "
            f"{FORMAT}); update flame-train to continue this run"
        )
    entries = manifest.get("files") if version == FORMAT else None
    step = _STEP.fullmatch(folder.name)
    if not isinstance(entries, dict) or not entries or step is None or manifest.get("step") != int(step.group(1)):
        return f"{MANIFEST} does not describe this folder"
    for name, entry in entries.items():
        flaw = _file_flaw(folder, name, entry)
        if flaw is not None:
            return flaw
    return None


def _file_flaw(folder: Path, name: str, entry: Any) -> str | None:
    path = folder / name
    if path.parent != folder or not isinstance(entry, dict):
        return f"{MANIFEST} lists {name!r}, which is not a file of this folder"
    try:
        actual = path.stat().st_size
        if actual != entry.get("size"):
            return f"{name} has {actual} bytes, its manifest says {entry.get('size')}"
        if _fingerprint(path)["sha256"] != entry.get("sha256"):
            return f"{name} does not match its SHA-256"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None
