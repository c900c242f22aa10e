"""Gradient norms by block of the network: where a run learns, and where its gradients explode or vanish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flame_train.engine import nn
from flame_train.engine.optim import Optimizer
from flame_train.networks.block_network import BlockNetwork


class GradientNorms:
    """The norm of each block's accumulated gradients, as the optimizer will divide them: by loss scale and batches.

    A trained matrix belongs to the innermost block that contains its layer; without a block, to the first part of its
    layer's name. Blocks come in the order of their names.
    """

    def __init__(self, optimizer: Optimizer, blocks: Iterable[str]) -> None:
        self._optimizer = optimizer
        names = sorted(blocks, key=len, reverse=True)
        spans: dict[str, list[tuple[int, int]]] = {}
        padded = dict(optimizer.arena.padding)
        for segment in optimizer.arena.segments:
            within = (name for name in names if segment.name.startswith(f"{name}."))
            block = next(within, segment.name.split(".", 1)[0])
            _extend(spans.setdefault(block, []), segment.start, padded.get(segment.stop, segment.stop))
        self._spans = dict(sorted(spans.items()))

    def read(self) -> Mapping[str, float]:
        """Returns the norms by block, summed in fp64; infinite or NaN where a gradient is. Waits for the device."""
        arena = self._optimizer.arena
        xp = arena.backend.xp
        with np.errstate(all="ignore"):
            sums = [
                sum(xp.sum(xp.square(arena.grads[start:stop].astype(np.float64))) for start, stop in spans)
                for spans in self._spans.values()
            ]
            norms = xp.sqrt(xp.stack(sums)) / (self._optimizer.loss_scale.data * self._optimizer.accumulation)
        values: np.ndarray[Any, Any] = arena.backend.to_host(norms)
        return dict(zip(self._spans, values.tolist(), strict=True))


def block_names(network: nn.Module) -> list[str]:
    """Returns the names of a network's blocks; empty if it has none."""
    return list(network.named_blocks()) if isinstance(network, BlockNetwork) else []


def _extend(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Adds a span, or continues the last one. Spans reach over the padding behind a segment, which is 0."""
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], stop)
    else:
        spans.append((start, stop))
