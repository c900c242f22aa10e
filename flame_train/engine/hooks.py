"""Hooks on tensors: functions that see a gradient when it is complete, and may put another in its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ShapeError, kind_of
from .dtype import Array

if TYPE_CHECKING:
    from .tensor import Tensor

Hook = Callable[["Tensor"], "Tensor | None"]


class Hooks(dict[object, Hook]):
    """The hooks of one tensor, in the order in which they were registered."""


class HookHandle:
    """Returned by `register_hook`; `remove()`, or leaving a `with` over it, takes the hook off again.

    It does not keep the hooks alive, nor they it: what a hook of a computed tensor refers to goes with the graph.
    """

    __slots__ = ("_hooks", "_key")

    def __init__(self, hooks: Hooks, key: object) -> None:
        self._hooks = weakref.ref(hooks)
        self._key = key

    def remove(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.pop(self._key, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register(hooks: Hooks, hook: Hook) -> HookHandle:
    """Adds a hook; the same function may be added several times. Raises TypeError for what cannot be called."""
    if not callable(hook):
        raise TypeError(f"hook: expected a function of the gradient, got {hook!r}")
    key = object()
    hooks[key] = hook
    return HookHandle(hooks, key)


def through(hooks: Hooks, g: Array) -> Array:
    """The gradient that `hooks` make of `g`, one after another. A hook may remove any of them meanwhile.

    Raises `TypeError` or `ShapeError` for a hook that returns no Tensor, or one of another dtype or shape.
    """
    for hook in tuple(hooks.values()):
        g = _replaced(hook, g)
    return g


def _replaced(hook: Hook, g: Array) -> Array:
    from .tensor import Tensor

    found = hook(Tensor(g))
    if found is None:
        return g
    if not isinstance(found, Tensor):
        raise TypeError(f"a hook: expected it to return a Tensor or None, got {kind_of(found)}")
    if found.shape != g.shape:
        raise ShapeError(f"a hook: expected it to return a gradient of shape {g.shape}, got {found.shape}")
    if found.dtype != g.dtype:
        raise TypeError(
            f"a hook: expected it to return a {g.dtype.name} gradient, got {found.dtype.name}; cast it back with .to()"
        )
    return found.data
