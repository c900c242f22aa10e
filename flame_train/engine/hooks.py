"""Hooks on tensors: functions that see a gradient when it is complete, and may put another in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ShapeError
from .dtype import Array

if TYPE_CHECKING:
    from .tensor import Tensor

Hook = Callable[["Tensor"], "Tensor | None"]


class HookHandle:
    """Returned by `register_hook`; `remove()`, or leaving a `with` over it, takes the hook off again."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        self._hooks.pop(self, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


Hooks = dict[HookHandle, Hook]
"""The hooks of one tensor, in the order in which they were registered."""


def register(hooks: Hooks, hook: Hook) -> HookHandle:
    """Adds a hook; one function may be there several times."""
    handle = HookHandle(hooks)
    hooks[handle] = hook
    return handle


def through(hooks: Hooks, g: Array) -> Array:
    """The gradient that `hooks` make of `g`. A hook may take any of them off meanwhile."""
    for hook in tuple(hooks.values()):
        g = _replaced(hook, g)
    return g


def _replaced(hook: Hook, g: Array) -> Array:
    from .tensor import Tensor

    found = hook(Tensor(g))
    if found is None:
        return g
    if not isinstance(found, Tensor):
        raise TypeError(f"a hook: expected it to return a Tensor or None, got {type(found).__name__}")
    if found.shape != g.shape:
        raise ShapeError(f"a hook returned a gradient of shape {found.shape} for a tensor of shape {g.shape}")
    if found.dtype != g.dtype:
        raise TypeError(f"a hook returned a {found.dtype.name} gradient for one of {g.dtype.name}; cast it back by .to")
    return found.data
