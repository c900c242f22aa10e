"""Stops at a chosen call by which a run touches its files, with `interpose.c` loaded before libc."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_LOADED = "ATTACK_INTERPOSED"


def load() -> None:
    """Starts this program again with the library in front of libc, if it is not there. Needs Linux and a C compiler."""
    if _LOADED in os.environ:
        return
    library = Path(tempfile.mkdtemp(prefix="attack-")) / "interpose.so"
    source = Path(__file__).with_name("interpose.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), _LOADED: str(library), "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def unload() -> None:
    """Removes the library's file: it stays loaded, and what this process starts later runs without it."""
    library = Path(os.environ.pop(_LOADED))
    del os.environ["LD_PRELOAD"]
    library.unlink()
    library.parent.rmdir()


def arm(folder: Path, at: int, number: int) -> None:
    """From here on the `at`th call (from 1) that touches what is below `folder` raises the signal; none with 0."""
    _library().attack_arm(os.fsencode(folder), ctypes.c_long(at), number)


def calls() -> int:
    """How many such calls there were since."""
    return int(_library().attack_calls())


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.attack_calls.restype = ctypes.c_long
    return library
