"""Launches as others see them: hooks on each, the arithmetic that is counted, and the kernels a run asks for.

It also counts what is multiplied, where somebody asks: a step on shapes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...dtype import DType
from ...mode import mode
from ..cupy_calls import CupyCall
from .made_once import started

_SHARE = 4
"""Cores to a thread that makes calls of CuPy: who meets a call that is not made yet compiles too, and needs a core.

For the same reason they come after our own kernels: together both took three times as long on 16 cores.
"""


@dataclass(frozen=True, slots=True)
class KernelRequests:
    """Kernels, as the arguments of `KernelModules.get`, of `KernelModules.generated`, and of `Cubins.get`.

    `calls` are those of CuPy, which compiles kernels of its own.
    """

    files: tuple[tuple[str, str, DType, int], ...]
    texts: tuple[tuple[str, str], ...]
    sm90: tuple[tuple[str, str, DType, int], ...]
    calls: tuple[CupyCall, ...] = ()

    def compile(self, modules: Any, cubins: Any, beside: Callable[[CupyCall], None]) -> None:
        """Starts compiling them on threads; those that take longest come first."""
        calls = [partial(cubins.get, *each) for each in self.sm90]
        calls += [partial(modules.get, *each) for each in self.files]
        calls += [partial(modules.generated, *each) for each in self.texts]
        ours = started(calls)
        started([partial(beside, each) for each in self.calls], _SHARE, ours)


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
