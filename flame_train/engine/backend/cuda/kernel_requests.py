"""Kernels that a run on shapes requested: the same run on a GPU will need them compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...dtype import DType
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
