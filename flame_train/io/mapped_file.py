"""A file's map that also reads into other memory."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Self

from flame_train.errors import EnvironmentFault, ModelFileError


class MappedFile(mmap.mmap):
    """The map of a whole file, read-only. Raises what `mmap.mmap` and `os.dup` raise."""

    _path: Path
    _descriptor: int

    def __new__(cls, path: Path, descriptor: int) -> Self:
        """Maps the file `path`, which is open at `descriptor` and may be closed afterwards."""
        mapped = super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)
        mapped._path, mapped._descriptor = path, os.dup(descriptor)
        weakref.finalize(mapped, os.close, mapped._descriptor)
        return mapped

    if sys.platform != "win32":

        def read_into(self, target: Any, begin: int) -> None:
            """Fills a writable buffer with the file's bytes from `begin` on.

            Raises ModelFileError where the file was cut since it was mapped, EnvironmentFault where the disk refuses.
            """
            view = memoryview(target)
            while view:
                try:
                    count = os.preadv(self._descriptor, [view], begin)
                except OSError as error:
                    raise EnvironmentFault(f"{self._path}: cannot be read now: {error.strerror or error}") from error
                if not count:
                    raise ModelFileError(f"{self._path}: was cut to {begin} bytes while it was read; start again")
                view, begin = view[count:], begin + count
