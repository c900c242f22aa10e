"""Weights that take the place of another network's for a while, so that a second network needs no memory for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.engine import Tensor, nn
from flame_train.engine.autograd.versions import VERSIONS
from flame_train.engine.backend.base import Offloaded
from flame_train.engine.dtype import Array
from flame_train.networks.block_offload import arrays_of, memory_order


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory on the device, and what each of two networks has there."""

    memory: Array
    mine: Offloaded
    theirs: Offloaded

    def hold(self, held: Offloaded) -> None:
        VERSIONS.mark_written(self.memory)
        held.fetch(self.memory)()


class SwappedWeights:
    """The resident weights of a loaded network, which lie where another network's do.

    Both wait in host memory. Inside `in_place` the network has its own on the device; afterwards the other has.

    Args:
        network: the network, whose memory for these weights is given back. Those that the other has not stay its own.
        lender: the other one, of the same architecture and number formats.
        streamed: the tensors of `network` that lie elsewhere.
    """

    def __init__(self, network: nn.Module, lender: nn.Module, streamed: frozenset[int]) -> None:
        self._places, own_weights = [], dict(network.weights())
        for name, theirs in lender.weights():
            for own, place in zip(arrays_of(own_weights[name]), arrays_of(theirs), strict=True):
                if own.size and id(own) not in streamed:
                    self._places.append(_borrowed(own, place))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the network's weights are on the device, and not the lender's."""
        for place in self._places:
            place.hold(place.mine)
        try:
            yield
        finally:
            for place in self._places:
                place.hold(place.theirs)


def _borrowed(own: Tensor, place: Tensor) -> _Place:
    mine, memory = _bytes(own.data), _bytes(place.data)
    backend = own.backend
    made = _Place(memory, backend.offload(mine, keep=True), backend.offload(memory, keep=True))
    own.data = place.data
    return made


def _bytes(array: Array) -> Any:
    return array.transpose(memory_order(array)).reshape(-1).view(np.uint8)
