"""Which blocks of a network a config wants checkpointed, and which wait in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from flame_train.engine import nn
from flame_train.errors import ConfigError
from flame_train.globs import choose
from flame_train.networks.blocks import BlockNetwork, Checkpointing, whole_blocks


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


_KEY = "model.offload"


def blocks_streamed(
    network: BlockNetwork, offload: str | float | Sequence[str], checkpointing: Checkpointing, recomputed: Set[str]
) -> frozenset[str]:
    """The names of the blocks that `model.offload` means; none for "auto", which `resolve_offload` decides.

    Args:
        network: the network.
        offload: the value of the key.
        checkpointing: what `gradient.checkpointing` recomputes.
        recomputed: the names of the blocks of which it does.

    Returns:
        The names.

    Raises:
        ConfigError: a glob means no block, or a block is not recomputed.
    """
    if offload == "off":
        return frozenset()
    if not whole_blocks(checkpointing):
        raise ConfigError(
            f'{_KEY}: expected gradient.checkpointing = "full" or "offload" with it, got "{checkpointing}": '
            "a block's weights are gone when its gradient is wanted, unless the block is recomputed"
        )
    if isinstance(offload, str):
        return frozenset()
    sizes = block_sizes(network)
    names = of_share(sizes, offload) if isinstance(offload, float | int) else _named(list(sizes), offload)
    if left := [name for name in names if name not in recomputed]:
        raise ConfigError(
            f"{_KEY}: expected blocks that are recomputed, got {len(left)} that gradient.checkpoint_blocks leaves out, "
            f"such as {left[0]}; name them there, or leave them out here"
        )
    return frozenset(names)


def block_sizes(network: BlockNetwork) -> dict[str, int]:
    """The number of weights of each block that can wait on the host, in the order in which the blocks run."""
    outside = {id(layer) for layer in network.run_outside()}
    return {
        name: sum(spec.size for _, module, _, spec in block.named_specs() if id(module) not in outside)
        for name, block in network.named_blocks().items()
    }


def of_share(sizes: Mapping[str, int], share: float) -> list[str]:
    """Blocks with at least this share of all weights, spread evenly, so that copies have time to hide behind others."""
    chosen, taken, passed = [], 0, 0
    for name, size in sizes.items():
        passed += size
        if taken < share * passed:
            chosen.append(name)
            taken += size
    return chosen


def text_share(offload: str | float | Sequence[str]) -> float:
    """The share of the text encoders' blocks that waits on the host while captions are encoded; globs name none."""
    return float(offload) if isinstance(offload, float | int) else 0.0


def text_blocks(network: nn.Module, share: float) -> list[str]:
    """The names of a text encoder's blocks that wait on the host."""
    assert isinstance(network, BlockNetwork)
    return of_share(block_sizes(network), share)


def _named(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    wrong = f"{_KEY}: no block of the model is named by"
    firsts = {name.partition(".")[0]: name for name in reversed(names)}
    advice = f"Use a glob over block names such as {', '.join(repr(name) for name in reversed(firsts.values()))}."
    return choose(names, globs or [""], {}, wrong, advice)
