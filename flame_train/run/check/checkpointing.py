"""Which blocks of a network a config wants checkpointed."""

from __future__ import annotations

from collections.abc import Sequence

from flame_train.globs import choose
from flame_train.networks.blocks import BlockNetwork, Checkpointing


def blocks_named(
    network: BlockNetwork,
    checkpointing: Checkpointing,
    globs: Sequence[str],
    key: str = "gradient.checkpoint_blocks",
) -> frozenset[str]:
    """The names of the blocks that `checkpointing` means where only those in `globs` are wanted; with no globs all are.

    Raises ConfigError naming `key` and every glob that means no block of which `checkpointing` recomputes something.
    """
    names = list(network.named_blocks(checkpointing))
    if not globs or checkpointing == "off":
        return frozenset(names)
    wrong = f'{key}: no block of the model that "{checkpointing}" recomputes is named by'
    firsts = {name.partition(".")[0]: name for name in reversed(names)}
    advice = f"Use a glob over block names such as {', '.join(repr(name) for name in reversed(firsts.values()))}."
    return frozenset(choose(names, globs, {}, wrong, advice))
