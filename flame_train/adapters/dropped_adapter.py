"""An adapter of which a training step leaves out parts, or which acts with a strength of the step's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flame_train.engine import Parameter, Tensor, nn

from .dropping import Chances, Drop, Drops
from .factors import Factors
from .kinds import Adapter, Layer


@dataclass(frozen=True, slots=True)
class DroppedAdapter:
    """An adapter of which a training step leaves out parts, in the adapter's place."""

    adapter: Adapter
    name: str
    chances: Chances
    drops: Drops = field(compare=False)

    def __call__(self, layer: Layer, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rng, strength = self.drops.rng, self.drops.strength
        if rng is None or not (self.chances.any or strength is not None):
            y = self.adapter(layer, x, residual)
        else:
            drop = Drop(self.chances, rng, self.name, strength, self.drops.levels)
            y = self.adapter.dropped(layer, x, drop)
            y = y if residual is None else y + residual
        return y

    def apply_grouped(self, layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...] | None:
        """Returns None, since each layer leaves out parts of its own."""
        return None

    def parameters(self) -> Mapping[str, Parameter]:
        return self.adapter.parameters()

    def delta(self) -> Tensor:
        return self.adapter.delta()

    def factors(self) -> Factors:
        return self.adapter.factors()

    def dropped(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        return self.adapter.dropped(layer, x, drop)

    def on(self, layer: Layer) -> DroppedAdapter:
        return replace(self, adapter=self.adapter.on(layer))

    def limit(self, max_norm: float) -> None:
        self.adapter.limit(max_norm)


def dropping(adapter: Adapter, name: str, chances: Chances, drops: Drops, per_sample_sign: bool = False) -> Adapter:
    """Returns an adapter as steps use it.

    Args:
        chances: the probabilities of what is left out.
        drops: the random numbers and the strength of the step that is running.
        per_sample_sign: whether a step may give it another strength.

    Returns:
        `adapter` itself, where no step changes anything about it.
    """
    return DroppedAdapter(adapter, name, chances, drops) if chances.any or per_sample_sign else adapter
