"""What of a network is run again in the backward pass instead of being kept, block by block."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar, Literal

from flame_train.engine import Tensor, checkpoint, nn

Recompute = Literal["nothing", "feed_forward", "blocks", "blocks_offloaded"]
"""What is run again in the backward pass instead of being kept; the inputs of offloaded blocks wait on the host."""


def run_again(recompute: Recompute) -> bool:
    """Whether whole blocks are."""
    return recompute in ("blocks", "blocks_offloaded")


class Block(nn.Module):
    """A part of which, as its `recompute` says, the inputs alone are kept. What `forward` is given are tensors.

    One with a feed-forward of its own sees to "feed_forward" itself; to the others it means nothing.
    """

    has_feed_forward: ClassVar[bool] = True
    recompute: Recompute = "nothing"

    def __call__(self, *inputs: Tensor | None) -> Any:
        if run_again(self.recompute):
            return checkpoint(self.forward, *inputs, offload=self.recompute == "blocks_offloaded")
        return self.forward(*inputs)


class BlockNetwork(nn.Module):
    """A network made of blocks. What of them is run again may be set at any time: `recompute` for all of them."""

    _recompute: Recompute = "nothing"

    def blocks(self, recompute: Recompute = "blocks") -> dict[str, Block]:
        """By name, in the network's order, the blocks of which `recompute` runs something again."""
        found = {name: part for name, part in self.named_modules() if isinstance(part, Block)}
        if recompute == "feed_forward":
            return {name: block for name, block in found.items() if block.has_feed_forward}
        return found if run_again(recompute) else {}

    @property
    def recompute(self) -> Recompute:
        """What is run again, in all blocks or in those that were chosen."""
        return self._recompute

    @recompute.setter
    def recompute(self, recompute: Recompute) -> None:
        self.recompute_only(recompute, self.blocks(recompute))

    def recompute_only(self, recompute: Recompute, names: Container[str]) -> None:
        """Has `recompute` mean the blocks of these names, and nothing of the others be run again."""
        self._recompute = recompute
        for name, block in self.blocks().items():
            block.recompute = recompute if name in names else "nothing"
