"""Kernels that a run on shapes requested: the same run on a GPU will need them compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...dtype import DType
from .made_once import started


@dataclass(frozen=True, slots=True)
class KernelRequests:
    """Kernels, as the arguments of `KernelModules.get`, of `KernelModules.generated`, and of `Cubins.get`."""

    files: tuple[tuple[str, str, DType, int], ...]
    texts: tuple[tuple[str, str], ...]
    sm90: tuple[tuple[str, str, DType, int], ...]

    def compile(self, modules: Any, cubins: Any) -> None:
        """Starts compiling them on threads; those that take longest come first."""
        calls = [partial(cubins.get, *each) for each in self.sm90]
        calls += [partial(modules.get, *each) for each in self.files]
        calls += [partial(modules.generated, *each) for each in self.texts]
        started(calls)
