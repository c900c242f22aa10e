"""A checkpoint by its name on the Hugging Face hub: the one place that may use the network, and only when asked to."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path

from flame_train.errors import ModelFileError
from flame_train.io.weights import cannot_be_read

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model")


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
    from huggingface_hub import snapshot_download

    _LOG.info("%s is no local path; looking on the Hugging Face hub", name)
    return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
