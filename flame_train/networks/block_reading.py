"""Blocks whose weights stay in their file: each is read before it runs, and forgotten when the next one runs.

Neither the device nor the host ever holds a whole network; the system keeps of the file what it has room for. A step
cannot hold such reading, so a network of this kind runs without capture and is never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flame_train.engine import nn
from flame_train.networks.block_network import Block, BlockNetwork


class WeightsInFile:
    """The policy of all blocks of a network.

    Args:
        network: the network.
        read: fills a block, by its name, with its weights.
    """

    def __init__(self, network: BlockNetwork, read: Callable[[str, nn.Module], None]) -> None:
        self._names: Mapping[int, str] = {id(block): name for name, block in network.named_blocks().items()}
        self._read = read
        self._held: Block | None = None
        network.place_weights(self)

    def ready(self, block: Block) -> None:
        """Reads the block's weights, unless it has them, once those of the block before are gone."""
        if self._held is block:
            return
        if self._held is not None:
            self._held.unload()
        self._held = None  # one whose reading fails has none, or a part of them
        self._read(self._names[id(block)], block)
        self._held = block


def resident_parts(network: BlockNetwork) -> dict[str, nn.Module]:
    """Returns the parts of a network, by name, that are in no block and hold weights of their own."""
    inside = {id(part) for block in network.named_blocks().values() for _, part in block.named_modules()}
    return {name: part for name, part in network.named_modules() if part._specs and id(part) not in inside}
