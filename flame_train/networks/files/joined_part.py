"""Several networks that are used as one, each with its weights in a place of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from flame_train.engine import nn
from flame_train.io.digests import Digests
from flame_train.networks.files.part import Part, Target


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JoinedPart(Part):
    """A network made of others. It has no tensors of its own: `sources` and `shapes` are empty.

    Attributes:
        parts: those others, by the attributes that they are.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)

    @classmethod
    def of(cls, first: str, parts: Mapping[str, Part], join: Callable[..., nn.Module]) -> Self:
        """The network that `join` makes of the parts' networks, named and placed as the part `first` of them."""

        def build() -> nn.Module:
            return join(**{name: part.build() for name, part in parts.items()})

        network = join(**{name: part.network for name, part in parts.items()})
        return cls(parts[first].component, parts[first].path, network, build, {}, {}, parts)

    def _fill(self, network: nn.Module, target: Target) -> None:
        for name, part in self.parts.items():
            part._fill(getattr(network, name), target)

    def digest(self, digests: Digests | None = None) -> str:
        summed = [f"{name} {part.digest(digests)}" for name, part in sorted(self.parts.items())]
        return hashlib.sha256("\n".join(summed).encode()).hexdigest()
