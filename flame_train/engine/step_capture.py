"""Capture: a whole step recorded once as a CUDA graph, and then replayed.

A graph replays the kernels and the addresses of the run that it recorded. So it must not outlive a change of what that
run used: an adapter attached, removed or scaled, a weight loaded anew, a part replaced. Modules count such changes
(`structure_changed`), and a captured step notes the state of the modules that its function calls. Before a replay it
compares counters, which costs nothing. Only if something has changed does it compare the states, and record again where
its own modules differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from .backend import Backend, get_backend


class CapturedPart(Protocol):
    """A module, as far as capture asks."""

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yields the module and every part below it."""

    def captured_state(self) -> list[Any]:
        """Returns the objects and numbers that a recorded run took from the part."""


class _Structure:
    """The number of changes of any module's structure."""

    changes = 0


_CALLED: ContextVar[dict[int, CapturedPart] | None] = ContextVar("flame_called_modules", default=None)


def structure_changed() -> None:
    """Counts a change after which a recorded run of a module may no longer be what the module computes."""
    _Structure.changes += 1


def note_call(part: CapturedPart) -> None:
    """Notes for the captured step that is running, if any, that it calls this module."""
    called = _CALLED.get()
    if called is not None:
        called[id(part)] = part


def capture(fn: Callable[[], None], device: str) -> Callable[[], None]:
    """Returns `fn` as a function to call again and again; on "cpu" `fn` itself.

    On "cuda" the first call runs `fn`, the second records it as a CUDA graph, and that and every later call replay it.
    A call after a module that `fn` calls has changed (an adapter, a weight loaded anew, `train()`) begins as the first.

    `fn` must be device work alone: static shapes, and inputs and outputs in tensors whose places do not change. Nothing
    may be read back to the host. Random numbers want a generator or an `rng` on the device. docs/examples.md lists
    what else it may not contain.

    Raises `EnvironmentFault` where "cuda" cannot be used, `ValueError` for another device. And, when called, what `fn`
    does, such as `RuntimeError` for a read back to the host.
    """
    backend = get_backend(device)
    return _Captured(fn, backend) if backend.asynchronous else backend.capture(fn)


class _Captured:
    """A captured step that is captured again once its modules have changed."""

    def __init__(self, fn: Callable[[], None], backend: Backend) -> None:
        self._run, self._backend = _NotedRun(fn), backend
        self._replay = backend.capture(self._run)

    def __call__(self) -> None:
        if self._run.is_outdated():
            self._backend.synchronize()  # a graph must not be destroyed while it runs
            self._replay = self._backend.capture(self._run)
        self._replay()


class _NotedRun:
    """A function that notes, each time it runs, the state of the modules that it calls."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._parts: list[CapturedPart] = []
        self._states: list[list[Any]] = []
        self._changes = -1  # before the first run

    def __call__(self) -> None:
        called: dict[int, CapturedPart] = {}
        token = _CALLED.set(called)
        try:
            self._fn()
        finally:
            _CALLED.reset(token)
        parts = {id(part): part for root in called.values() for _, part in root.named_modules()}
        self._parts = list(parts.values())
        self._states = [part.captured_state() for part in self._parts]
        self._changes = _Structure.changes

    def is_outdated(self) -> bool:
        """Tells whether the modules of the last run have another state than after it."""
        if self._changes in (-1, _Structure.changes):
            return False
        self._changes = _Structure.changes
        return not all(
            _same(part.captured_state(), state) for part, state in zip(self._parts, self._states, strict=True)
        )


def _same(now: list[Any], then: list[Any]) -> bool:
    """Tells whether two states hold the same objects; numbers and texts are compared by value."""
    return len(now) == len(then) and all(
        a is b or (isinstance(a, int | float | str) and type(a) is type(b) and a == b)
        for a, b in zip(now, then, strict=True)
    )
