"""Hooks on tensors: functions that see a gradient when it is complete, and may put another in its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..dtype import Array

ArrayHook = Callable[[Array], Array]
"""A hook as the backward pass calls it: of the gradient's array, returning the array to pass on."""


class Hooks(dict[object, ArrayHook]):
    """The hooks of one tensor, in the order in which they were registered."""

    def run(self, g: Array) -> Array:
        """The gradient that the hooks make of `g`, one after another. A hook may remove any of them meanwhile."""
        for hook in tuple(self.values()):
            g = hook(g)
        return g

    def register(self, hook: ArrayHook) -> HookHandle:
        """Adds a hook; the same function may be added several times."""
        key = object()
        self[key] = hook
        return HookHandle(self, key)


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
