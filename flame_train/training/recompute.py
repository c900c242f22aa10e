"""Which blocks of a network a config wants to be run again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from flame_train.config.globs import choose
from flame_train.config.schema import Config
from flame_train.models.recompute import BlockNetwork, Recompute


def recomputed(config: Config, network: BlockNetwork) -> tuple[Recompute, frozenset[str]]:
    """What a config wants to be run again, and the names of the blocks of which it does; as `blocks_named`."""
    recompute = config.gradient.recompute if config.gradient.checkpointing else "nothing"
    return recompute, blocks_named(network, recompute, config.gradient.recompute_only, "gradient.recompute_only")


def blocks_named(network: BlockNetwork, recompute: Recompute, globs: Sequence[str], key: str) -> frozenset[str]:
    """The names of the blocks that `recompute` means where only those in `globs` are wanted; with no globs all are.

    Raises ConfigError naming `key` and every glob that means no block of which `recompute` runs something again.
    """
    names = list(network.blocks(recompute))
    if not globs or recompute == "nothing":
        return frozenset(names)
    wrong = f'{key}: no block of the model that "{recompute}" recomputes is named by'
    firsts = {name.partition(".")[0]: name for name in reversed(names)}
    advice = f"Use a glob over block names such as {', '.join(repr(name) for name in reversed(firsts.values()))}."
    return frozenset(choose(names, globs, {}, wrong, advice))
