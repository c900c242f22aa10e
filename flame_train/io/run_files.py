"""The files that a run owns, and what a folder holds before a run takes it.

A folder has that run, nothing, or what the run must not write over. A link among them would lead elsewhere.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io import commit
from flame_train.io.commit import is_checkpoint
from flame_train.io.json_values import text, whole
from flame_train.io.runlog import FORMAT, STATUS, read_status

UNNAMED: Final = "lora"
LARGEST: Final = 1 << 28
"""Bytes of a file that is read whole: what waits in a checkpoint, a config."""
_OURS: Final = ("config.toml", "lora.safetensors", "checkpoints", "log.jsonl")

Differences = Callable[[str, commit.Checkpoint | None], str | None]
"""(the folder's `config.toml`, its checkpoint) -> a table of the settings that forbid continuing, or None."""


def examine(held: OpenFolder, folder: Path, lora: str, differences: Differences) -> commit.Checkpoint | None:
    """Returns the checkpoint to continue from, or None in a new run.

    Args:
        held: the folder.
        folder: its path, for messages.
        lora: the name of the LoRA's file.
        differences: what forbids continuing the run.

    Raises:
        OutputError: it holds what is no run, another run, or one that lost what it needs.
    """
    present = [name for name in (*_OURS, lora) if held.lstat(name) is not None]
    if held.lstat(STATUS) is None:
        if present:
            raise OutputError(
                f"{folder}: expected a new folder or one that holds a run, but found {present[0]} "
                "without status.json, and would overwrite it; set output.dir to another folder"
            )
        return None
    _refuse_format(folder, read_status(held))
    checkpoint = commit.newest(held / "checkpoints")
    if "config.toml" in present:
        _refuse_differences(held, folder, checkpoint, differences)
    elif present:  # a run that was killed before its first line wrote neither
        raise OutputError(
            f"{folder}: its config.toml is gone, so nobody knows whether this config continues the run that "
            "it holds; put it back, or set output.dir to another folder for a new run"
        )
    if checkpoint is None and _has_saved(held, lora):
        raise OutputError(
            f"{folder}: its checkpoints are gone, and the run would start again over its files; put them "
            "back, set output.dir to another folder, or remove this one"
        )
    return checkpoint


class OtherSettings(OutputError):
    """A run folder whose run has other settings than the config."""


def _refuse_format(folder: Path, status: Mapping[str, Any]) -> None:
    """Refuses a run that a version with another layout wrote. An invalid status is ignored."""
    form, version = whole(status.get("format")) or 0, text(status.get("version"), "of an unknown version")
    if form != FORMAT and status.get("version") is not None:
        raise OutputError(
            f"{folder / STATUS}: expected a run of format {FORMAT}, got one of format {form}, which "
            f"flame-train {version} wrote; finish it with that version, or set output.dir to another folder"
        )


def _refuse_differences(
    held: OpenFolder, folder: Path, checkpoint: commit.Checkpoint | None, differences: Differences
) -> None:
    table = differences(held.read("config.toml", LARGEST).decode(errors="replace"), checkpoint)
    if table is not None:
        raise OtherSettings(
            f"{folder}: its config.toml is of a run with other settings, which change its result:\n{table}\n"
            "set them back to continue that run, or set output.dir to another folder for a new one"
        )


def _has_saved(held: OpenFolder, lora: str) -> bool:
    """Tells whether the run was far enough to have a checkpoint."""
    status = read_status(held)
    saved = status.get("saved", status.get("step") if status.get("state") == "done" else 0)
    return bool(saved) or any(held.lstat(name) is not None for name in (f"{UNNAMED}.safetensors", lora))


_FILES: Final = re.compile(
    r"\.lock|(config\.toml|(status|dataset|images)\.json|log\.jsonl|dataset\.jpg|controls\.png|report\.html|loss\.png)"
)
_LORA: Final = r"(lora|{})(\.\w+)?\.safetensors"
SIGNS: Final = ".ranks"
"""The folder of signs of life, by which several processes watch each other."""
_FOLDERS: Final = ("checkpoints", "samples", "tensorboard", "wandb", SIGNS)
_SAMPLE: Final = re.compile(r"step-\d{6,}(-base)?\.(png|webp)")
_SIGN: Final = re.compile(r"\d{1,9}\.json")


def is_sample(name: str) -> bool:
    """Tells whether a sample grid is called so."""
    return _SAMPLE.fullmatch(name) is not None


def is_sign(name: str) -> bool:
    """Tells whether a sign of life is called so."""
    return _SIGN.fullmatch(name) is not None


def refuse_links(folder: OpenFolder, lora: str = "lora") -> None:
    """Raises OutputError, before writing, where something else has a name that a run owns; `lora` is its result's."""
    results = re.compile(_LORA.format(re.escape(lora)))
    for name in folder.names():
        if _FILES.fullmatch(name) or results.fullmatch(name):
            _refuse_other(folder, name, stat.S_ISREG, "a plain file")
        elif name in _FOLDERS:
            _refuse_other(folder, name, stat.S_ISDIR, "a folder")
            with folder.folder(name) as inside:
                _refuse_links_among(inside, name)


def _refuse_links_among(folder: OpenFolder, kind: str) -> None:
    for name in folder.names():
        if (kind == "samples" and is_sample(name)) or (kind == SIGNS and is_sign(name)):
            _refuse_other(folder, name, stat.S_ISREG, "a plain file")
        elif kind == "checkpoints" and is_checkpoint(name):
            _refuse_other(folder, name, stat.S_ISDIR, "a folder")
            with folder.folder(name) as checkpoint:
                for file in checkpoint.names():
                    _refuse_other(checkpoint, file, lambda mode: not stat.S_ISLNK(mode), "a plain file")


def _refuse_other(folder: OpenFolder, name: str, is_right: Callable[[int], bool], called: str) -> None:
    status = folder.lstat(name)
    if status is None or is_right(status.st_mode):
        return
    path = folder.path / name
    what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(status.st_mode) else "something else"
    raise OutputError(
        f"{path}: expected {called} of this run, found {what}, and would write there; put {called} in its place, or "
        "set output.dir to another folder (which may be a link itself)"
    )
