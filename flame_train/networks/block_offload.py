"""Blocks whose weights wait in host memory: each is copied to the device before it runs, into one of two buffers.

While a block computes, a stream of its own copies the next one into the other buffer. A recomputed block's forward
pass and its backward pass share one copy. A block has its place in the same buffer each time, so its weights have fixed
addresses, and a captured step holds the copies (`docs/design/0011-streamed-weights.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from flame_train.engine import Tensor, nn
from flame_train.engine.autograd.versions import VERSIONS
from flame_train.engine.backend import Backend, extent, owner
from flame_train.engine.backend.base import Offloaded
from flame_train.engine.backend.kept_arrays import KeptArrays
from flame_train.engine.dtype import Array, DType
from flame_train.engine.mode import mode
from flame_train.networks.block_network import Block, BlockNetwork, whole_blocks


@dataclass(frozen=True, slots=True)
class _Borrowed:
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
        own_weights, memories = dict(network.weights()), list[Array]()
        kept = KeptArrays(next(iter(own_weights.values())).backend)
        for name, theirs in lender.weights():
            for own, place in zip(arrays_of(own_weights[name]), arrays_of(theirs), strict=True):
                if own.size and id(own) not in streamed:
                    memories.append(_bytes(place.data))
                    for number, array in enumerate((_bytes(own.data), memories[-1]), 2 * len(memories)):
                        kept.add(number, array)
                    own.data = place.data
        kept.complete()
        self._places = [_Borrowed(m, kept[2 * n], kept[2 * n + 1]) for n, m in enumerate(memories, 1)]

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


def _bytes(array: Array) -> Any:
    return array.transpose(memory_order(array)).reshape(-1).view(np.uint8)


BUFFERS: Final = 2
_ALIGNED: Final = 512  # bytes, as arrays of a pool are
_BYTE: Final = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an array of a tensor lies in its block's buffer."""

    tensor: Tensor
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...]
    """The dims from the slowest to the fastest in memory."""

    def of(self, buffer: Array) -> Array:
        dense = [self.shape[i] for i in self.order]
        size = int(np.prod(dense, dtype=np.int64)) * self.dtype.itemsize
        flat = buffer[self.offset : self.offset + size].view(self.dtype)
        return flat.reshape(dense).transpose([self.order.index(i) for i in range(len(self.order))])


@dataclass(slots=True)
class _Waiting:
    """A block's weights on the host."""

    places: list[_Place]
    nbytes: int


class StreamedWeights:
    """The policy of a network's blocks of these names, whose order is that in which they run.

    It is an `OffloadOnLoad` while the network is loaded. `begin` makes the buffers, after which the blocks can run.
    From then on the blocks know it and it knows no block: without a circle their memory is free as soon as nobody
    needs the network.
    """

    def __init__(self, network: Any, names: Collection[str], backend: Backend) -> None:
        assert isinstance(network, BlockNetwork)
        self._network: BlockNetwork | None = network
        self.parts: list[Block] = [block for name, block in network.named_blocks().items() if name in names]
        self._numbers = {id(block): number for number, block in enumerate(self.parts)}
        self._resident = {id(layer) for layer in network.run_outside()}
        self._waiting: dict[int, _Waiting] = {}
        self._backend, self._kept = backend, KeptArrays(backend)
        self._buffers: list[Array] = []
        self._holds: list[int | None] = []
        self._arrivals: list[Callable[[], None] | None] = []
        self._program = -1

    # ---- while the network is loaded ----------------------------------------------------------------

    def reads(self, part: Block, layer: nn.Module, spec: nn.ParamSpec) -> bool:
        """Tells whether this process needs the values of a weight: what stays on the device, and its own blocks'."""
        stays = spec.is_buffer or id(layer) in self._resident
        return stays or self._kept.is_own(self._numbers[id(part)])

    def move(self, part: Block) -> None:
        """Copies the weights of a block to the host, and gives their memory on the device back."""
        tensors = [t for t in self._tensors(part) if t.size]
        offsets, size = _laid_out([t.data for t in tensors])
        number, backend = self._numbers[id(part)], self._backend
        gathered = backend.empty((size,), _BYTE)
        places = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            place = _Place(tensor, offset, tensor.shape, tensor.dtype, memory_order(tensor.data))
            place.of(gathered)[...] = tensor.data
            places.append(place)
        self._kept.add(number, gathered)
        self._waiting[number] = _Waiting(places, size)
        for tensor in tensors:
            tensor.data = backend.empty((0,), tensor.dtype)

    def begin(self) -> None:
        """Makes the buffers, and gives each block's weights their places there."""
        self._kept.complete()
        backend = self._backend
        count = min(BUFFERS, len(self.parts))
        sizes = [max(w.nbytes for number, w in self._waiting.items() if number % count == i) for i in range(count)]
        self._buffers = [backend.empty((size,), _BYTE) for size in sizes]
        self._holds, self._arrivals = [None] * count, [None] * count
        for number, waiting in self._waiting.items():
            for place in waiting.places:
                place.tensor.data = place.of(self._buffers[number % count])
        assert self._network is not None
        self._network.place_weights(self)
        self._network, self.parts = None, []

    @property
    def tensors(self) -> frozenset[int]:
        """The ids of all tensors that wait."""
        return frozenset(id(place.tensor) for waiting in self._waiting.values() for place in waiting.places)

    def _tensors(self, part: Block) -> Iterator[Tensor]:
        """Yields the arrays of a block's weights, whatever their number formats: a packed weight has several."""
        for _, module, attr, spec in part.named_specs():
            if id(module) not in self._resident and not spec.is_buffer:
                yield from arrays_of(getattr(module, attr))

    # ---- while it runs ------------------------------------------------------------------------------

    def ready(self, block: Block) -> None:
        """Waits for the block's weights, and sends for those of the block that runs next."""
        number = self._numbers.get(id(block))
        if number is None:
            return
        if mode().grad and not whole_blocks(block.checkpointing):
            raise RuntimeError("a streamed block must be recomputed: its weights are gone when its gradient is wanted")
        if self._program != self._backend.program:
            self._program = self._backend.program
            self._holds, self._arrivals = [None] * len(self._buffers), [None] * len(self._buffers)
        self._send_for(number)
        following = number - 1 if mode().recomputing else number + 1
        if following in self._waiting:
            self._send_for(following)
        self._wait(number)

    def _send_for(self, number: int) -> None:
        """Starts copying a block, unless it is in its buffer; what runs there now is done first."""
        place = number % len(self._buffers)
        if self._holds[place] != number:
            self._holds[place] = number
            waiting = self._waiting[number]
            self._arrivals[place] = self._kept[number].fetch(self._buffers[place][: waiting.nbytes])

    def _wait(self, number: int) -> None:
        place = number % len(self._buffers)
        arrived = self._arrivals[place]
        if arrived is not None:
            arrived()
            self._arrivals[place] = None


def arrays_of(weight: Any) -> list[Tensor]:
    """Returns the tensors that a weight is made of."""
    if isinstance(weight, Tensor):
        return [weight]
    parts = (getattr(weight, field.name) for field in fields(weight))
    return [part for part in parts if isinstance(part, Tensor)]


def memory_order(array: Array) -> tuple[int, ...]:
    """Returns the dims from the slowest to the fastest. Raises ValueError for an array with gaps."""
    order = tuple(sorted(range(array.ndim), key=lambda i: -array.strides[i]))
    if not array.transpose(order).flags.c_contiguous:
        raise ValueError(f"expected a weight without gaps in memory, got {array.shape} with strides {array.strides}")
    return order


def _laid_out(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Places each array in one buffer, and sizes it: what lies in one array's memory stays as near as it was."""
    spans: dict[int, tuple[int, int]] = {}
    for array in arrays:
        begin, end = extent(array)
        first, last = spans.get(id(owner(array)), (begin, end))
        spans[id(owner(array))] = min(first, begin), max(last, end)
    offsets, size = {}, 0
    for key, (first, last) in spans.items():
        offsets[key] = size - first
        size += -(-(last - first) // _ALIGNED) * _ALIGNED
    return [offsets[id(owner(array))] + extent(array)[0] for array in arrays], size
