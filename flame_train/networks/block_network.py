"""Networks made of blocks: which activations a block saves for its backward pass, and where its weights live.

What the `forward` of transformers and of their blocks takes has the same name everywhere; capitals are its shape.

- `x_BHWC`: noised latents, patched where the family patches them. `times_B`: noise levels, fp32.
- `controls`: latents without noise (B, h, w, C) of images that are looked at, of any size each.
- `context_BTC`: the text encoder's states. `rows_B`, int32: how many of their rows, from the first on, are looked at.
- `img_BLD`, `txt_BTD`, `x_BLD`, `x_BSD`: tokens of the image, of the text, and of all in a row.
- `cos_S1E`, `sin_S1E`, or `cos` and `sin`: rotary angles of these tokens.
- `seen_B`, int32: how many tokens, from the first on, are looked at. `mask`, bool (B, 1, 1, S): which; None: all.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, Literal, Protocol

from flame_train.engine import Tensor, checkpoint, nn, no_grad
from flame_train.engine import functional as F
from flame_train.engine.dtype import float16

MOST: Final = 65504.0
"""fp16's largest number."""


def bounded(x: Tensor) -> Tensor:
    """Returns values of fp16 clamped to its largest number, where infinities would be; others as they are."""
    return F.clamp(x, -MOST, MOST) if x.dtype == float16 else x


Checkpointing = Literal["off", "full", "offload", "mlp"]
"""What the backward pass recomputes: nothing, blocks, blocks with inputs on the host, or MLPs."""


def whole_blocks(checkpointing: Checkpointing) -> bool:
    """Says whether whole blocks are recomputed."""
    return checkpointing in ("full", "offload")


class WeightPolicy(Protocol):
    """Where the weights of blocks live: a block asks before it runs."""

    def ready(self, block: Block) -> None:
        """Sees to it that the block's weights are on the device, for the forward pass or a recomputation."""


class Resident:
    """All weights stay on the device, in whatever number format they were loaded."""

    def ready(self, block: Block) -> None:
        return None


class Block(nn.Module):
    """A part of a network that can be checkpointed: then only its inputs are saved. All inputs are tensors or None.

    A block with an MLP handles "mlp" itself; the others ignore it.
    """

    has_feed_forward: ClassVar[bool] = True
    checkpointing: Checkpointing = "off"
    weight_policy: WeightPolicy = Resident()

    def __call__(self, *inputs: Tensor | None) -> Any:
        if whole_blocks(self.checkpointing):
            return checkpoint(self._run, *inputs, offload=self.checkpointing == "offload")
        return self._run(*inputs)

    def _run(self, *inputs: Tensor | None) -> Any:
        self.weight_policy.ready(self)
        return self.forward(*inputs)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Which linear layers may be stored in fewer bits, by patterns of their paths, with `*` for anything.

    Attributes:
        layers: those that may.
        exact: names of parts whose inputs are never rounded. A modulation has one row an image: rounding it would cost
            accuracy and save no time.
        unless_rotated: those that "int8-convrot" leaves as they are, as published files of it for ComfyUI do.
    """

    layers: tuple[str, ...]
    exact: frozenset[str] = frozenset()
    unless_rotated: tuple[str, ...] = ()

    def of(self, network: nn.Module, rotated: bool) -> dict[nn.Linear, bool]:
        """Returns a network's, as `Module.quantizable` has it."""
        left_out = self.unless_rotated if rotated else ()
        return {
            m: self.exact.isdisjoint(name.split("."))
            for name, m in network.named_modules()
            if isinstance(m, nn.Linear) and _fits(name, self.layers) and not _fits(name, left_out)
        }


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class BlockNetwork(nn.Module):
    """A network made of blocks. Checkpointing and the place of weights may be set at any time."""

    rounded: ClassVar[Rounded] = Rounded(())
    _checkpointing: Checkpointing = "off"

    def quantizable(self, rotated: bool = False) -> dict[nn.Linear, bool]:
        return self.rounded.of(self, rotated)

    def named_blocks(self, checkpointing: Checkpointing = "full") -> dict[str, Block]:
        """By name, in the network's order, the blocks of which `checkpointing` recomputes something."""
        blocks = {name: part for name, part in self.named_modules() if isinstance(part, Block)}
        if checkpointing == "mlp":
            return {name: block for name, block in blocks.items() if block.has_feed_forward}
        return blocks if whole_blocks(checkpointing) else {}

    @property
    def checkpointing(self) -> Checkpointing:
        """The recomputation policy, of all blocks or of the chosen ones."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, checkpointing: Checkpointing) -> None:
        self.checkpoint_blocks(checkpointing, self.named_blocks(checkpointing))

    def checkpoint_blocks(self, checkpointing: Checkpointing, names: Container[str]) -> None:
        """Sets `checkpointing` for the blocks of these names, and "off" for the others."""
        self._checkpointing = checkpointing
        for name, block in self.named_blocks().items():
            block.checkpointing = checkpointing if name in names else "off"

    def place_weights(self, policy: WeightPolicy) -> None:
        """Has every block ask `policy` for its weights."""
        for block in self.named_blocks().values():
            block.weight_policy = policy

    def ensure_loaded(self, layer: str) -> None:
        part: Any = self
        for name in layer.split("."):
            part = getattr(part, name, None)
            if isinstance(part, Block):
                with no_grad():
                    part.weight_policy.ready(part)

    def run_outside(self) -> Collection[nn.Module]:
        """Returns the layers of blocks that run before their block does: a policy keeps these on the device."""
        return ()
