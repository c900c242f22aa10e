"""Addresses of files elsewhere, as fsspec writes them: s3://bucket/folder, sftp://host/folder."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

HUB: Final = "hf:"
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_address(text: str) -> bool:
    """Whether `text` is an address, and no path of this machine."""
    return _ADDRESS.fullmatch(text) is not None


def is_hub_name(text: str) -> bool:
    """Whether `text` asks for a model or a file of the Hugging Face hub, as hf:owner/name does."""
    return text.startswith(HUB)


def scheme_of(address: str) -> str:
    """What stands before ://, in lower case."""
    return address.partition("://")[0].lower()


def name_of(address: str) -> str:
    """The last part of the path."""
    return address.rstrip("/").rpartition("/")[2]


def problem_of(address: str) -> str | None:
    """What is wrong with an address, without repeating it: what is wrong may be a secret. None if nothing is.

    Settings are copied into run folders and files, so an address may hold no credentials.
    """
    if not is_address(address):
        return "expected an address such as s3://bucket/folder or sftp://host/folder, got none"
    place = address.partition("://")[2]
    try:
        parts = urlsplit(address)
        held = parts.password is not None or (scheme_of(address) not in ("sftp", "ssh") and parts.username is not None)
        _ = parts.port
    except ValueError as error:
        return f"expected an address such as s3://bucket/folder or sftp://host/folder: {error}"
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
