"""Kernels that the package `flame-train-kernels` brings compiled, so that a first run does not wait for the compiler.

`scripts/kernels_wheel.py` makes the package. A kernel is found by all that it was compiled from: the compiler's
version, architecture, text and options. So what is found has the bytes that compiling it here would give. What is not
found is compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "flame_train_kernels"


def package_folder() -> Path | None:
    """Returns where the package is installed; None if it is not."""
    spec = find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def compiler_version(cupy: Any) -> str:
    """NVRTC's version, such as "13.0"."""
    return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))


def kernel_path(package: Path, version: str, architecture: str, text: str, options: Sequence[str]) -> Path:
    """Returns a kernel's file in the package. Folders of headers among the options do not count.

    Args:
        package: the package's folder.
        version: the compiler's, such as "13.0".
        architecture: such as "sm_90".
        text: the kernel's source, headers of ours included.
        options: of the compiler.

    Returns:
        The path, whether the file is there or not.
    """
    asked = "\n".join((*(o for o in options if not o.startswith("-I")), text))
    return package / version / architecture / f"{hashlib.sha256(asked.encode()).hexdigest()[:40]}.cubin"


class PrebuiltKernels:
    """The installed package's kernels for one architecture, by this machine's compiler."""

    def __init__(self, cupy: Any, architecture: str) -> None:
        self._package, self._architecture = package_folder(), architecture
        self._version = compiler_version(cupy) if self._package else ""

    def find(self, text: str, options: Sequence[str]) -> Path | None:
        """Returns the file of a kernel; None if there is none."""
        if self._package is None:
            return None
        path = kernel_path(self._package, self._version, self._architecture, text, options)
        return path if path.is_file() else None
