"""Lets a hook see every kernel launch, and skip it: ours by the kernel's name, a library's by the kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LaunchHook = Callable[[str, Sequence[Any]], bool]
"""Given a launch's name and arguments (none for a library's), answers whether to launch."""


class LaunchHooks:
    """Asked before each launch; everything is launched unless `hooked`."""

    def __init__(self) -> None:
        self._hook: LaunchHook | None = None

    @contextmanager
    def hooked(self, hook: LaunchHook) -> Iterator[None]:
        """Asks `hook` of every launch inside, whichever thread's."""
        self._hook = hook
        try:
            yield
        finally:
            self._hook = None

    def should_launch(self, name: str, args: Sequence[Any] = ()) -> bool:
        """Whether to launch."""
        return self._hook is None or self._hook(name, args)
