"""A checkpoint by its name on the Hugging Face hub. Only this module uses the network, and only on request.

`hf:owner/name` asks for it, in a command that may fetch. A missing path never does: a misspelt `models/sdxl` has the
form of a name on the hub. A request would send it, with the user's token, to someone else.
"""

from __future__ import annotations

import functools
import glob
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from flame_train.addresses import is_address
from flame_train.errors import ModelFileError
from flame_train.io.kept import local_place
from flame_train.io.weights import COMPONENTS, VARIANTS, cannot_be_read

_LOG = logging.getLogger(__name__)
_ASKS: Final = "hf:"
_HOST: Final = "huggingface.co"
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_SECRET: Final = re.compile(r"hf_\w+|Bearer [^\s'\"]+")
_WANTED: Final = ("*.json", "*.safetensors", "*.txt", "*.model")
_VARIANT: Final = re.compile(rf"\.(?:{'|'.join(VARIANTS)})[.-]")
_may_fetch: ContextVar[bool] = ContextVar("may_fetch", default=False)


@contextmanager
def fetching(allowed: bool = True) -> Iterator[None]:
    """In the body `hf:owner/name` is fetched where it is not kept yet; everywhere else the network is not used."""
    before = _may_fetch.set(allowed)
    try:
        yield
    finally:
        _may_fetch.reset(before)


def resolve_checkpoint(name: str) -> Path:
    """`name` as a path that exists: that path, or the hub's local cache for `owner/name` and `hf:owner/name`.

    An address is the place in the cache to which a run fetched it.

    The latter is fetched to the cache where `fetching` allows it. Raises `ModelFileError` if there is none of them.
    """
    if is_address(name):
        return _fetched_before(name)
    if name.startswith(_ASKS):
        return _of_hub(name, name.removeprefix(_ASKS))
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise ModelFileError(cannot_be_read(path, cause)) from error
    is_name = _HUB_ID.fullmatch(name) is not None and not name.endswith(".safetensors")
    if is_name and (kept := _kept(name)) is not None:
        return kept
    raise ModelFileError(
        f"{name}: expected a .safetensors file or a diffusers folder; there is no such file"
        + (f", nor a model of that name in the hub's local cache; to fetch it from the hub: hf:{name}" * is_name)
    )


def _fetched_before(address: str) -> Path:
    """The copy in the cache of what an address names. Raises `ModelFileError` if there is none."""
    path = local_place(address)
    if not path.exists():
        raise ModelFileError(f"{address}: was not fetched yet; `flame-train train` and `flame-train cache` fetch it")
    return path


def _of_hub(name: str, model: str) -> Path:
    if not _HUB_ID.fullmatch(model):
        raise ModelFileError(f"{name}: expected a model's name on the hub after hf:, as in hf:owner/name")
    if not _may_fetch.get():
        kept = _kept(model)
        if kept is not None:
            return kept
        raise ModelFileError(
            f"{name}: is not in the hub's local cache, and only a command that works with it fetches it; start one "
            f"without --dry-run, or: hf download {model}"
        )
    try:
        return _fetched(model)
    except Exception as e:  # the hub's client raises its own, the HTTP library's and OSError
        cause = _SECRET.sub("(token)", f"{type(e).__name__}: {e}")
        raise ModelFileError(
            f"{name}: neither in the hub's local cache nor to be had from it ({cause}); "
            "check the name, log in with `hf auth login` if it is gated, or name a local file"
        ) from None  # not from e, which may repeat what was sent


def _kept(model: str) -> Path | None:
    """The model in the local cache; None if it is not there. The network is not used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True, token=False))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


@functools.cache
def _fetched(model: str) -> Path:
    """Once in a process: every part of it asks, and the hub may have other files a moment later, or be out of reach."""
    from huggingface_hub import list_repo_files, snapshot_download

    _LOG.info("looking for %s on the Hugging Face hub", model)
    token = _token()
    try:
        files = list_repo_files(model, token=token)
    except Exception:
        kept = _kept(model)
        if kept is None:
            raise
        return kept
    wanted = [glob.escape(file) for file in read_of(files)]
    return Path(snapshot_download(model, allow_patterns=wanted, token=token))


def _token() -> Literal[False] | None:
    """Whether the user's token is sent: None, as the client does by itself, or False where the endpoint is another."""
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    host = place.hostname or ""
    return None if place.scheme == "https" and (host == _HOST or host.endswith(f".{_HOST}")) else False


def read_of(files: Sequence[str]) -> list[str]:
    """The files of a repository that are read: of weights those of a diffusers folder, if it is one, each once.

    Such repositories often hold the same model in one file too, and in several precisions.
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
