"""Features that only some operating systems have: modules of the standard library, flags of `os.open`."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

NONBLOCK: Final[int] = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe does not wait for its other end. Windows has no pipes among its files."""

BINARY: Final[int] = getattr(os, "O_BINARY", 0)
"""Line ends stay as they are: Windows alone would translate them."""

FOLDER: Final[int | None] = getattr(os, "O_DIRECTORY", None)
"""A folder is opened, and nothing else; None where `os.open` opens no folders."""

NO_LINK: Final[int | None] = getattr(os, "O_NOFOLLOW", None)
"""A link is refused and not followed; None where `os.open` follows every link."""

READ_AND_SYNC: Final[int] = os.O_RDONLY if FOLDER is not None else os.O_RDWR
"""A file is read, and then waited for to be on the disk: Windows syncs only what could be written to."""


HAS_CHANGE_TIME: Final[bool] = not hasattr(os.stat_result, "st_file_attributes")
"""`st_ctime` is when a file was changed last, and nobody can set it. On Windows it is when the file was made."""


def optional_module(name: str) -> ModuleType | None:
    """The module, or None where the system lacks it. The name is a string: mypy knows the module on one system only."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
