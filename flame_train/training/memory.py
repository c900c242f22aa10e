"""What the memory of a training step depends on."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from flame_train.engine.ops.attention.head_split import larger_part
from flame_train.models.common.blocks import Checkpointing, whole_blocks

H100: Final = 132
"""Its multiprocessors, and an H200's: for one of these memory is predicted where there is no GPU."""


@dataclass(frozen=True, slots=True)
class MemoryQuery:
    """What the memory of a step depends on: bucket (H, W) in pixels, images, bytes an element, and how it is run.

    `checkpointing` means the blocks named in `blocks`; None: all. `warpgroups`: the GPU's multiprocessors, if they have
    the products of warpgroups, as compute capability 9.0 does, else 0. `adapted` are the names of the layers with a
    LoRA.
    """

    bucket: tuple[int, int]
    batch: int
    itemsize: int
    checkpointing: Checkpointing
    deterministic: bool
    blocks: Container[str] | None = None
    warpgroups: int = H100
    adapted: frozenset[str] = frozenset()

    def of(self, block: str) -> Checkpointing:
        """What is run again of the block of that name."""
        return self.checkpointing if self.blocks is None or block in self.blocks else "off"

    def made_again(self, most: float, spared: float) -> float:
        """The activations of a block while it is recomputed, in units of the caller: `most` of the largest.

        Capped at what checkpointing has `spared`, so that checkpointing more never predicts more memory.
        """
        return min(most, spared) if whole_blocks(self.checkpointing) else 0

    def scores(self, heads: int, head: int, length: int) -> int:
        """Bytes of one attention's scores, which cuDNN's backward pass writes down for the sake of determinism.

        Ours does not: it is asked in fp32, and by heads of 64 where there are warpgroups. cuDNN is asked for some of
        the heads at a time there, if that costs nothing.
        """
        if not self.deterministic or self.itemsize > 2 or (self.warpgroups and head == 64):
            return 0
        if self.warpgroups:
            heads = larger_part(self.batch, heads, length, length, self.itemsize, self.warpgroups)
        return self.batch * heads * length**2 * self.itemsize
