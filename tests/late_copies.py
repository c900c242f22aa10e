"""Copies from the host that arrive when they are awaited: who reads too early, or too late, finds other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flame_train.engine.backend.cpu import CpuBackend


class Late:
    """A copy on the host that arrives when it is awaited, and spoils at once what its place held."""

    def __init__(self, held: Any, copied: Counter[int]) -> None:
        self._held, self._copied, self.nbytes = held, copied, held.nbytes

    def fetch(self, out: Any) -> Callable[[], None]:
        assert out.shape == (self.nbytes,)
        self._copied[id(self)] += 1
        out[...] = 0xAA
        return lambda: self._held.fetch(out) and None


def late_copies(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Makes copies that are kept arrive late on the CPU. Returns how often each came."""
    offload, found = CpuBackend.offload, Counter[int]()

    def offloaded(backend: CpuBackend, array: Any, *, keep: bool = False) -> Any:
        held = offload(backend, array, keep=keep)
        return Late(held, found) if keep else held

    monkeypatch.setattr(CpuBackend, "offload", offloaded)
    return found
