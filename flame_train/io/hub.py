"""A checkpoint by its name on the Hugging Face hub: the one place that may use the network, and only when asked to."""

from __future__ import annotations

import functools
import glob
import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from flame_train.errors import ModelFileError
from flame_train.io.weights import COMPONENTS, VARIANTS, cannot_be_read

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model")
_VARIANT = re.compile(rf"\.(?:{'|'.join(VARIANTS)})[.-]")


def resolve_checkpoint(name: str) -> Path:
    """`name` as a path that exists. A hub id (`owner/name`) that is no local path is fetched to the hub's cache.

    Raises `ModelFileError` if there is neither.
    """
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ModelFileError(cannot_be_read(path, error)) from error
    if not _HUB_ID.fullmatch(name) or name.endswith(".safetensors"):
        raise ModelFileError(
            f"{name}: expected a .safetensors file, a diffusers folder or a hub id (owner/name); there is no such file"
        )
    try:
        return _fetched(name)
    except Exception as e:  # the hub's client raises its own, the HTTP library's and OSError
        raise ModelFileError(
            f"{name}: neither a local path nor found on the hub ({type(e).__name__}: {e}); "
            "check the name, log in with `hf auth login` if it is gated, or name a local file"
        ) from e


@functools.cache
def _fetched(name: str) -> Path:
    """Once in a process: every part of it asks, and the hub may have other files a moment later, or be out of reach."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    _LOG.info("%s is no local path; looking on the Hugging Face hub", name)
    try:
        files = list_repo_files(name)
    except Exception as out_of_reach:
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            raise out_of_reach from None
    return Path(snapshot_download(name, allow_patterns=[glob.escape(file) for file in read_of(files)]))


def read_of(files: Sequence[str]) -> list[str]:
    """What is read of a repository's files: of weights those of a diffusers folder, if it is one, each once.

    Such repositories often hold the same model in one file as well, and in other precisions beside the full one.
    """
    wanted = [file for file in files if any(fnmatch(file, pattern) for pattern in _WANTED)]
    weights = {file: file.rpartition("/")[0] for file in wanted if file.endswith(".safetensors")}
    components = set(COMPONENTS).intersection(weights.values())
    whole = {folder for file, folder in weights.items() if not _VARIANT.search(file)}

    def spared(file: str) -> bool:
        folder = weights.get(file)
        if folder is None:
            return False
        return bool(components and folder not in components) or (folder in whole and bool(_VARIANT.search(file)))

    return [file for file in wanted if not spared(file)]
