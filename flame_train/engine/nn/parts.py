"""Parts of a network that go elsewhere as soon as they are loaded, so that the whole is never on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..backend import Backend


class Mover(Protocol):
    """Takes the weights of parts of a network."""

    @property
    def parts(self) -> Collection[Any]:
        """The parts; none lies in another."""

    def move(self, part: Any) -> None:
        """Takes the weights of a part, which are loaded and packed."""


class Completion:
    """Packs the weights of a network while it is filled, and hands each part over once it has all of them.

    Args:
        module: the network.
        backend: the device that it is filled on.
        mover: takes the parts; None: all stay.
    """

    def __init__(self, module: Any, backend: Backend, mover: Mover | None) -> None:
        self._module, self._backend, self._mover = module, backend, mover
        parts = () if mover is None else mover.parts
        inside = {id(layer): part for part in parts for _, layer in part.named_modules()}
        owners = [inside.get(id(layer)) for _, layer, _, _ in module.named_specs()]
        self._ends = {id(part): place for place, part in enumerate(owners) if part is not None}
        self._parts = {self._ends[id(part)]: part for part in parts if id(part) in self._ends}
        self._groups: dict[int, list[Sequence[Any]]] = {}  # by part
        self._rest: list[Sequence[Any]] = []  # those in no part, or in several
        for group in module.fusable_groups():
            first, *others = {id(inside.get(id(layer))) for layer in group}
            alone = not others and first in self._ends
            (self._groups.setdefault(first, []) if alone else self._rest).append(group)

    def after(self, place: int) -> None:
        """The weight at this place of the network's order is there, as all before it."""
        part = self._parts.get(place)
        if part is not None and self._mover is not None:
            self._pack(self._groups.get(id(part), ()))
            self._mover.move(part)

    def end(self) -> None:
        """All weights are there."""
        self._pack(self._rest)

    def _pack(self, groups: Sequence[Sequence[Any]]) -> None:
        if self._backend.kernels is not None:
            self._module.pack_contiguous(groups)
