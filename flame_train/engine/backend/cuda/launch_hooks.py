"""Lets a hook see every kernel launch, and skip it: ours by the kernel's name, a library's by the kind of work.

It also counts what is multiplied, where somebody asks: a step on shapes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...mode import mode

LaunchHook = Callable[[str, Sequence[Any]], bool]
"""Given a launch's name and arguments (none for a library's), answers whether to launch."""


class Flops:
    """Floating-point operations by kind: of what is made `once`, and of what is made `again` for the backward pass."""

    def __init__(self) -> None:
        self.once, self.again = Counter[str](), Counter[str]()


class LaunchHooks:
    """Asked before each launch; everything is launched unless `hooked`."""

    def __init__(self) -> None:
        self._hook: LaunchHook | None = None
        self.flops: Flops | None = None

    def multiplied(self, kind: str, flops: int) -> None:
        """Notes the floating-point operations of a product, two a multiply-add, by kind; nothing by default."""
        if self.flops is not None:
            (self.flops.again if mode().recomputing else self.flops.once)[kind] += flops

    @contextmanager
    def hooked(self, hook: LaunchHook) -> Iterator[None]:
        """Asks `hook` of every launch inside, whichever thread's."""
        self._hook = hook
        try:
            yield
        finally:
            self._hook = None

    def should_launch(self, name: str, args: Sequence[Any] = ()) -> bool:
        """Tells whether to launch."""
        return self._hook is None or self._hook(name, args)
