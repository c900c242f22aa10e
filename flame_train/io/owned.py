"""The files and folders that a run owns in its folder. A link there would have it write, or prune, elsewhere."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io.commit import is_checkpoint

_FILES: Final = re.compile(
    r"\.lock|(config\.toml|(status|dataset|images)\.json|log\.jsonl|dataset\.jpg|controls\.png|report\.html|loss\.png)"
)
_LORA: Final = r"(lora|{})(\.\w+)?\.safetensors"
SIGNS: Final = ".ranks"
"""The folder of signs of life, by which several processes watch each other."""
_FOLDERS: Final = ("checkpoints", "samples", "tensorboard", "wandb", SIGNS)
_SAMPLE: Final = re.compile(r"step-\d{6,}\.png")
_SIGN: Final = re.compile(r"\d{1,9}\.json")


def is_sample(name: str) -> bool:
    """Whether a sample grid is called so."""
    return _SAMPLE.fullmatch(name) is not None


def is_sign(name: str) -> bool:
    """Whether a sign of life is called so."""
    return _SIGN.fullmatch(name) is not None


def refuse_links(folder: OpenFolder, lora: str = "lora") -> None:
    """Raises OutputError, before anything is written, where something else has the name of what a run owns.

    `lora` is the name of its result without the ending.
    """
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


def _refuse_other(folder: OpenFolder, name: str, wanted: Callable[[int], bool], called: str) -> None:
    found = folder.lstat(name)
    if found is None or wanted(found.st_mode):
        return
    path = folder.path / name
    what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(found.st_mode) else "something else"
    raise OutputError(
        f"{path}: expected {called} of this run, found {what}, and would write there; put {called} in its place, or "
        "set output.dir to another folder (which may be a link itself)"
    )
