"""Where the files lie that a config names by addresses: in the user's cache, a folder for each address.

`remote.inputs` fetches them there. A path of this machine is itself.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flame_train.errors import ConfigError
from flame_train.io.addresses import is_address, name_of
from flame_train.user_cache import user_cache


def folder_for(address: str) -> Path:
    """The folder with what an address names, and with the record of it. Raises ConfigError for a user without one."""
    base = user_cache("remote")
    if base is None:
        raise ConfigError(f"{address}: there is no place to fetch it to; set XDG_CACHE_HOME to a folder")
    return base / hashlib.sha256(address.rstrip("/").encode("utf-8", "surrogateescape")).hexdigest()[:20]


def local_place(text: str) -> Path:
    """The file or folder that a config names, or its copy in the cache, whose last name is that of the address."""
    return folder_for(text) / name_of(text) if is_address(text) else Path(text)
