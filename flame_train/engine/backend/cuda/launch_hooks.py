"""Lets a watcher see every kernel launch, and skip it: ours by the kernel's name, a library's by the kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Watcher = Callable[[str, Sequence[Any]], bool]
"""Given a launch's name and arguments (none for a library's), answers whether to launch."""


class Launches:
    """Asked before each launch; everything is launched unless `watched`."""

    def __init__(self) -> None:
        self._watcher: Watcher | None = None

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Asks `watcher` of every launch inside, whichever thread's."""
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def wanted(self, name: str, args: Sequence[Any] = ()) -> bool:
        """Whether to launch."""
        return self._watcher is None or self._watcher(name, args)
