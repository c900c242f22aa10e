"""Parts of a network that go elsewhere as soon as they are loaded, so that the whole is never on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol


class Mover(Protocol):
    """Takes the weights of parts of a network."""

    @property
    def parts(self) -> Collection[Any]:
        """The parts; none lies in another."""

    def move(self, part: Any) -> None:
        """Takes the weights of a part, which are loaded and packed."""


class Complete(NamedTuple):
    """A part with all its weights, and the groups of its layers that are packed next to each other."""

    part: Any
    groups: Sequence[Sequence[Any]]


class Ends:
    """Where in the order of a network's weights each part of it is complete.

    Args:
        modules: the module of each weight, in that order.
        groups: the layers whose weights are packed next to each other.
        parts: the parts.
    """

    def __init__(self, modules: Sequence[Any], groups: Sequence[Sequence[Any]], parts: Collection[Any]) -> None:
        inside = {id(module): part for part in parts for _, module in part.named_modules()}
        ends = {id(inside[id(m)]): place for place, m in enumerate(modules) if id(m) in inside}
        self.rest: list[Sequence[Any]] = []
        """The groups that lie in no part, or in several."""
        own: dict[int, list[Sequence[Any]]] = {}
        for group in groups:
            first, *others = {id(inside.get(id(layer))) for layer in group}
            (self.rest if others or first not in ends else own.setdefault(first, [])).append(group)
        weighted = (part for part in parts if id(part) in ends)
        self._complete = {ends[id(part)]: Complete(part, own.get(id(part), ())) for part in weighted}

    def at(self, place: int) -> Complete | None:
        """The part that is complete with the weight at `place`."""
        return self._complete.get(place)
