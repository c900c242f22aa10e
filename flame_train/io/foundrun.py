"""What a folder holds before a run takes it: that run, nothing, or what the run must not write over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io import commit
from flame_train.io.json_values import text, whole
from flame_train.io.runstatus import FORMAT, STATUS, read_status

UNNAMED: Final = "lora"
LARGEST: Final = 1 << 28
"""Bytes of a file that is read whole: what waits in a checkpoint, a config."""
_OURS: Final = ("config.toml", "lora.safetensors", "checkpoints", "log.jsonl")

Differences = Callable[[str, commit.Found | None], str | None]
"""(the folder's `config.toml`, its checkpoint) -> a table of the settings that forbid continuing, or None."""


def examine(held: OpenFolder, folder: Path, lora: str, differences: Differences) -> commit.Found | None:
    """The checkpoint to continue from, or None in a new run.

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
    found = commit.newest(held / "checkpoints")
    if "config.toml" in present:
        _refuse_differences(held, folder, found, differences)
    elif present:  # a run that was killed before its first line wrote neither
        raise OutputError(
            f"{folder}: its config.toml is gone, so nobody knows whether this config continues the run that "
            "it holds; put it back, or set output.dir to another folder for a new run"
        )
    if found is None and _has_saved(held, lora):
        raise OutputError(
            f"{folder}: its checkpoints are gone, and the run would start again over its files; put them "
            "back, set output.dir to another folder, or remove this one"
        )
    return found


class OtherSettings(OutputError):
    """A run folder whose run has other settings than the config."""


def _refuse_format(folder: Path, status: Mapping[str, Any]) -> None:
    """A run that a version with another layout wrote. An invalid status is ignored."""
    found, version = whole(status.get("format")) or 0, text(status.get("version"), "of an unknown version")
    if found != FORMAT and status.get("version") is not None:
        raise OutputError(
            f"{folder / STATUS}: expected a run of format {FORMAT}, got one of format {found}, which "
            f"flame-train {version} wrote; finish it with that version, or set output.dir to another folder"
        )


def _refuse_differences(held: OpenFolder, folder: Path, found: commit.Found | None, differences: Differences) -> None:
    table = differences(held.read("config.toml", LARGEST).decode(errors="replace"), found)
    if table is not None:
        raise OtherSettings(
            f"{folder}: its config.toml is of a run with other settings, which change its result:\n{table}\n"
            "set them back to continue that run, or set output.dir to another folder for a new one"
        )


def _has_saved(held: OpenFolder, lora: str) -> bool:
    """Whether the run was far enough to have a checkpoint."""
    status = read_status(held)
    saved = status.get("saved", status.get("step") if status.get("state") == "done" else 0)
    return bool(saved) or any(held.lstat(name) is not None for name in (f"{UNNAMED}.safetensors", lora))
