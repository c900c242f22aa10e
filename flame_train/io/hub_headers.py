"""The headers of weights on the Hugging Face hub, by range requests: a few MB tell what --dry-run asks of a model.

They are written to a temporary folder of the process, beside the small files of the repository.
"""

from __future__ import annotations

import functools
import glob
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from flame_train.io.header import MAX_HEADER_BYTES
from flame_train.io.safetensors import declare_header_alone

_FIRST: Final = 1 << 17  # bytes that are asked for first: more than most headers take
_SECONDS: Final = 30.0


def headers_of(model: str, files: Sequence[str], token: Literal[False] | None, download: str) -> Path:
    """A folder with the header of each safetensors file of a repository and with the other `files` whole.

    Args:
        model: the repository.
        files: its files that are wanted.
        token: as the hub's client takes it.
        download: the command that fetches the weights, for messages.

    Returns:
        The folder.

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
        wanted = [glob.escape(file) for file in others]
        folder = Path(snapshot_download(model, allow_patterns=wanted, token=token, cache_dir=_folder()))
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
    """Removed as the process ends."""
    return tempfile.TemporaryDirectory(prefix="flame-train-headers-")


def _header(model: str, file: str, token: Literal[False] | None) -> bytes:
    """The header of a safetensors file, its length included."""
    begin = _range(model, file, token, _FIRST)
    length = 8 + int.from_bytes(begin[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(f"{file} is no safetensors file: its header would take {length} bytes")
    return (begin if len(begin) >= length else _range(model, file, token, length))[:length]


def _range(model: str, file: str, token: Literal[False] | None, size: int) -> bytes:
    """The first bytes of a file. A server that would send all of it is refused before it does."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=token) | {"Range": f"bytes=0-{size - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", hf_hub_url(model, file), headers=headers, timeout=_SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise OSError(f"{response.url.host} sends no part of a file")
        found = bytearray()
        for chunk in response.iter_bytes():
            found += chunk
            if len(found) >= size:
                break
    return bytes(found)
