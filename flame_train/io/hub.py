"""Models and files by their names on the Hugging Face hub. This module alone asks it, on request.

`hf:owner/name` names a model, `hf:owner/name/file` or `hf:owner/name/folder` a part of one. A missing path never asks:
a misspelt `models/sdxl` has the form of a name on the hub. A request would send it, with the user's token, to someone
else.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from flame_train.errors import ModelFileError
from flame_train.io.addresses import HUB, is_address, is_hub_name, local_place
from flame_train.io.foreign_files import refused_by_suffix
from flame_train.io.header import MAX_HEADER_BYTES
from flame_train.io.model_search import Found, current_search, remember_sum, remembered_sum
from flame_train.io.safetensors import declare_header_alone
from flame_train.io.weights import COMPONENTS, VARIANTS, cannot_be_read

_LOG = logging.getLogger(__name__)
_HOST: Final = "huggingface.co"
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_NAME: Final = re.compile(rf"({_HUB_ID.pattern})(?:/(.*\S))?", re.DOTALL)
_BESIDE: Final = ("config.json", "adapter_config.json")  # settings of the weights in the same folder
_FILES: Final = (".safetensors", ".gguf", ".json", ".model", ".txt")
_NAMED: Final = 20  # files of a repository, in a message
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SECRET: Final = re.compile(r"hf_\w+|Bearer [^\s'\"]+")
_WANTED: Final = ("*.json", "*.safetensors", "*.txt", "*.model")
_VARIANT: Final = re.compile(rf"\.(?:{'|'.join(VARIANTS)})[.-]")

Fetch = Literal["nothing", "headers", "all"]
"""What of a name on the hub comes over the network where it is not kept here."""

_fetch: ContextVar[Fetch] = ContextVar("fetch", default="nothing")


@contextmanager
def fetching(what: Fetch = "all") -> Iterator[None]:
    """Allows the body to fetch so much of what `hf:` names and is not kept yet; elsewhere the network is not used."""
    before = _fetch.set(what)
    try:
        yield
    finally:
        _fetch.reset(before)


def resolve_checkpoint(name: str) -> Path:
    """Finds `name` as a path that exists: that path, or the hub's local cache for `owner/name` and what `hf:` names.

    An address is the place in the cache to which a run fetched it.

    What `hf:` names is fetched to the cache where `fetching` allows it. Raises `ModelFileError` if there is none of
    them.
    """
    if is_address(name):
        return _cached_address(name)
    if is_hub_name(name):
        return _of_hub(name)
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise ModelFileError(cannot_be_read(path, cause)) from error
    is_name = _HUB_ID.fullmatch(name) is not None and not name.endswith(".safetensors")
    if is_name and (cached := _cached(name, "")) is not None:
        return cached
    raise ModelFileError(
        f"{name}: expected a .safetensors file or a diffusers folder; there is no such file"
        + (f", nor a model of that name in the hub's local cache; to fetch it from the hub: hf:{name}" * is_name)
    )


def path_of_setting(name: str | Path) -> Path:
    """Returns the file or folder that a setting names: by its path, an address, or a name on the hub.

    Only for the last it must be there, or come. Raises `ModelFileError` where it does not.
    """
    text = name.as_posix() if isinstance(name, Path) else name
    return _of_hub(text) if is_hub_name(text) else local_place(text)


def fetch_path(name: str | Path) -> Path:
    """Does as `placed`, and fetches what `hf:` names: for a command that works with the file alone."""
    with fetching():
        return path_of_setting(name)


def _cached_address(address: str) -> Path:
    """Returns the copy in the cache of what an address names. Raises `ModelFileError` if there is none."""
    path = local_place(address)
    if not path.exists():
        raise ModelFileError(f"{address}: was not fetched yet; `flame-train train` and `flame-train cache` fetch it")
    return path


def _of_hub(name: str) -> Path:
    match = _NAME.fullmatch(name.removeprefix(HUB))
    model, inner = (match[1], match[2] or "") if match else ("", "")
    parts = (*model.split("/"), *(inner.split("/") if inner else ()))
    if not match or any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise ModelFileError(
            f"{name}: expected a model's name on the hub after hf:, as in hf:owner/name, or a file of it, as in "
            "hf:owner/name/file.safetensors"
        )
    if reason := refused_by_suffix(Path(inner)):
        raise ModelFileError(f"{name}: refused. {reason}")
    what = _fetch.get()
    if what != "all" and (path := _cached(model, inner)) is not None:
        return path
    if _is_weights(inner) and _cached(model, inner) is None and (path := _kept_elsewhere(model, inner, what)):
        return path
    download = f"hf download {model}" + (f" {inner}" if _is_file(inner) else "")
    if what == "nothing":
        raise ModelFileError(
            f"{name}: is not in the hub's local cache, and only a command that works with it fetches it: {download}"
        )
    try:
        return _fetch_part(model, inner) if what == "all" else _headers(model, inner, download)
    except Exception as e:  # the hub's client raises its own, the HTTP library's and OSError
        cause = without_token(f"{type(e).__name__}: {e}")
        alone = "" if what == "all" else f"; without its headers: {download}, or start without --dry-run"
        raise ModelFileError(
            f"{name}: neither in the hub's local cache nor to be had from it ({cause}); "
            f"check the name, log in with `hf auth login` if it is gated, or name a local file{alone}"
        ) from None  # not from e, which may repeat what was sent


def _is_file(inner: str) -> bool:
    """Tells whether a path in a repository is a file's; else it is a folder's."""
    return PurePosixPath(inner).suffix.lower() in _FILES


def _is_weights(inner: str) -> bool:
    return inner.lower().endswith(_FILES[:2])


def _kept_elsewhere(model: str, inner: str, what: Fetch) -> Path | None:
    """Returns the file in a folder of `model.search` whose size and SHA-256 are those of a file on the hub."""
    search, name = current_search(), f"{model}/{inner}"
    if not search.folders:
        return None
    if what != "nothing":
        _ask_sum(name, model, inner)
    told = remembered_sum(name)
    path = None if told is None else search.with_sum(*told)
    if told is not None and path is not None:
        search.note(Found(f"{HUB}{name}", path, f"its SHA-256 is that on the hub ({told[1][:12]})"))
    return path


def _ask_sum(name: str, model: str, inner: str) -> None:
    """Asks the hub for a file's size and SHA-256, and keeps them. Without an answer what it said before holds."""
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    place, token = hf_hub_url(model, inner), token_sent()
    with contextlib.suppress(OSError, ValueError, httpx.HTTPError):  # the client's own are of the first two
        said = get_hf_file_metadata(place, token=token, timeout=_SECONDS)
        if said.size is not None and said.etag is not None and _SHA256.fullmatch(said.etag):
            remember_sum(name, said.size, said.etag)


def _cached(model: str, inner: str) -> Path | None:
    """Returns the model or its part in the local cache; None if it is not there, whole. The network is not used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # without patterns it wants every file of the repository, of which only those that are read were fetched
        place = Path(snapshot_download(model, allow_patterns=[], local_files_only=True, token=False)) / inner
        return place if place.is_file() or _has_weights(place) else None
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _has_weights(folder: Path) -> bool:
    """Tells whether weights were fetched to a folder: of a pipeline each network's, of shards all, if it is told."""
    listed = _json(folder / "model_index.json")
    listed_parts = {name: part for name in COMPONENTS if isinstance(part := listed.get(name), list) and any(part)}
    networks = [folder / name for name in listed_parts] or [folder]
    if not all(any(place.glob("*.safetensors")) for place in networks):
        return False
    indices = [index for place in networks for index in place.glob("*.safetensors.index*.json")]
    return all((index.parent / shard).exists() for index in indices for shard in _shards(index))


def _shards(index: Path) -> set[str]:
    weight_map = _json(index).get("weight_map")
    return {shard for shard in weight_map.values() if isinstance(shard, str)} if isinstance(weight_map, dict) else set()


def _json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file; empty where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@functools.cache
def _fetch_part(model: str, inner: str) -> Path:
    """Fetches once in a process: every part of it asks, and the hub may have other files or be gone a moment later."""
    from huggingface_hub import list_repo_files, snapshot_download

    _LOG.info("looking for %s on the Hugging Face hub", f"{model}/{inner}".rstrip("/"))
    token = token_sent()
    try:
        files = list_repo_files(model, token=token)
    except Exception:
        path = _cached(model, inner)
        if path is None:
            raise
        return path
    patterns = [glob.escape(file) for file in _of_part(files, inner)]
    return Path(snapshot_download(model, allow_patterns=patterns, token=token)) / inner


@functools.cache
def _headers(model: str, inner: str, download: str) -> Path:
    """Returns the model or its part as a folder or file whose weights are headers alone."""
    from huggingface_hub import list_repo_files

    _LOG.info("reading headers of %s on the Hugging Face hub", f"{model}/{inner}".rstrip("/"))
    token = token_sent()
    files = list_repo_files(model, token=token)
    return headers_of(model, _of_part(files, inner), token, download) / inner


def _of_part(files: Sequence[str], inner: str) -> list[str]:
    """Picks the files that are read of a repository, or of its file or folder. FileNotFoundError where it has none."""
    within = [file for file in files if not inner or file == inner or file.startswith(f"{inner}/")]
    if not within:
        near = [file for file in files if file.endswith(_FILES[:2])][:_NAMED]
        raise FileNotFoundError(f"it has no {inner}; weights in it are {', '.join(near) or 'none'}")
    if not _is_file(inner):
        return read_of(within)
    beside = [PurePosixPath(inner).with_name(name).as_posix() for name in _BESIDE]
    return [inner, *(file for file in beside if file in files and file != inner)]


def without_token(text: str) -> str:
    """Returns a message without the user's token, which a library may have repeated."""
    from huggingface_hub import get_token

    token = get_token()
    return _SECRET.sub("(token)", text.replace(token, "(token)") if token else text)


def token_sent() -> Literal[False] | None:
    """Says whether the user's token is sent: None, as the client does by itself, or False to another endpoint."""
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    host = place.hostname or ""
    return None if place.scheme == "https" and (host == _HOST or host.endswith(f".{_HOST}")) else False


def read_of(files: Sequence[str]) -> list[str]:
    """Returns the files of a repository that are read: of weights those of a diffusers folder, if it is one, each once.

    Such repositories often hold the same model in one file too, and in several precisions.
    """
    readable = [file for file in files if any(fnmatch(file, pattern) for pattern in _WANTED)]
    weights = {file: file.rpartition("/")[0] for file in readable if file.endswith(".safetensors")}
    components = set(COMPONENTS).intersection(weights.values())
    whole = {folder for file, folder in weights.items() if not _VARIANT.search(file)}

    def spared(file: str) -> bool:
        folder = weights.get(file)
        if folder is None:
            return False
        return bool(components and folder not in components) or (folder in whole and bool(_VARIANT.search(file)))

    return [file for file in readable if not spared(file)]


_FIRST: Final = 1 << 17  # bytes that are asked for first: more than most headers take
_SECONDS: Final = 30.0


def headers_of(model: str, files: Sequence[str], token: Literal[False] | None, download: str) -> Path:
    """Returns a folder with the header of each safetensors file of a repository and with the other `files` whole.

    Args:
        files: its files that are wanted.
        token: as the hub's client takes it.
        download: the command that fetches the weights, for messages.

    Raises:
        OSError: the hub does not answer, or sends no part of a file; also the errors of its client.
    """
    from huggingface_hub import snapshot_download

    weights = [file for file in files if file.endswith(".safetensors")]
    others = [file for file in files if file not in weights]
    if packed := next((file for file in others if file.endswith(".gguf")), None):
        raise OSError(f"the header of {packed} is not read over the network")
    folder = _folder() / f"models--{model.replace('/', '--')}" / "snapshots" / "headers"
    if others:
        patterns = [glob.escape(file) for file in others]
        folder = Path(snapshot_download(model, allow_patterns=patterns, token=token, cache_dir=_folder()))
    for file in weights:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_header(model, file, token))
        declare_header_alone(path, download)
    return folder


@functools.cache
def _folder() -> Path:
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder that is removed as the process ends."""
    return tempfile.TemporaryDirectory(prefix="flame-train-headers-")


def _header(model: str, file: str, token: Literal[False] | None) -> bytes:
    begin = _range(model, file, token, _FIRST)
    length = 8 + int.from_bytes(begin[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(f"{file} is no safetensors file: its header would take {length} bytes")
    return (begin if len(begin) >= length else _range(model, file, token, length))[:length]


def _range(model: str, file: str, token: Literal[False] | None, size: int) -> bytes:
    """Returns the first bytes of a file. A server that would send all of it is refused before it does."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=token) | {"Range": f"bytes=0-{size - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", hf_hub_url(model, file), headers=headers, timeout=_SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise OSError(f"{response.url.host} sends no part of a file")
        received = bytearray()
        for chunk in response.iter_bytes():
            received += chunk
            if len(received) >= size:
                break
    return bytes(received)
