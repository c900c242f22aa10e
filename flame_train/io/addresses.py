"""Addresses of files elsewhere, as fsspec writes them: s3://bucket/folder, sftp://host/folder."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

HUB: Final = "hf:"
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_USER: Final = re.compile(r"[A-Za-z0-9_.\\$+-]+")


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
