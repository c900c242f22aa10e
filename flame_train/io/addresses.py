"""Addresses of files elsewhere, as fsspec writes them: s3://bucket/folder, sftp://host/folder; and their copies.

What an address names lies in the user's cache, a folder for each address. `remote.fetch` brings it there.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from flame_train.disk.preflight import user_cache
from flame_train.errors import ConfigError

HUB: Final = "hf:"
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_USER: Final = re.compile(r"[A-Za-z0-9_.\\$+-]+")


def is_address(text: str) -> bool:
    """Tells whether `text` is an address, and no path of this machine."""
    return _ADDRESS.fullmatch(text) is not None


def is_hub_name(text: str) -> bool:
    """Tells whether `text` asks for a model or a file of the Hugging Face hub, as hf:owner/name does."""
    return text.startswith(HUB)


def scheme_of(address: str) -> str:
    """Returns what stands before ://, in lower case."""
    return address.partition("://")[0].lower()


def name_of(address: str) -> str:
    """Returns the last part of the path."""
    return address.rstrip("/").rpartition("/")[2]


def problem_of(address: str) -> str | None:
    """Returns what is wrong with an address, without repeating it: what is wrong may be a secret. None if nothing is.

    Settings are copied into run folders and files, so an address may hold no credentials.
    """
    if not is_address(address):
        return "expected an address such as s3://bucket/folder or sftp://host/folder, got none"
    place = address.partition("://")[2]
    if "::" in scheme_of(address) or "://" in place:
        return "expected one address, got several in a row (not repeated here)"
    try:
        parts = urlsplit(address)
        user = parts.username
        held = parts.password is not None or (scheme_of(address) not in ("sftp", "ssh") and user is not None)
        held = held or (user is not None and _USER.fullmatch(user) is None)
        _ = parts.port
    except ValueError:  # its text may have what was meant as a password
        return (
            "expected an address such as s3://bucket/folder or sftp://host:22/folder; what follows the colon of this "
            "one is no port (not repeated here)"
        )
    if held:
        return (
            "expected an address without credentials (not repeated here), which are read where the provider's own "
            "programs read them; remove what stands before @"
        )
    if "?" in place or "#" in place:
        return "expected an address without ? and #, after which a signature may stand (not repeated here)"
    if not place.isprintable() or any(part in (".", "..") for part in place.split("/")):
        return "expected an address of printable characters without . and .. as parts"
    if not place.strip("/"):
        return "expected a place after ://, got none"
    return None


def folder_for(address: str) -> Path:
    """Names the folder with what an address names, and its record. Raises ConfigError for a user without one."""
    base = user_cache("remote")
    if base is None:
        raise ConfigError(f"{address}: there is no place to fetch it to; set XDG_CACHE_HOME to a folder")
    return base / hashlib.sha256(address.rstrip("/").encode("utf-8", "surrogateescape")).hexdigest()[:20]


def local_place(text: str) -> Path:
    """Gives the file or folder that a config names, or its copy in the cache, called as the address ends."""
    return folder_for(text) / name_of(text) if is_address(text) else Path(text)
