"""Rules between the keys of what is recomputed and of what waits in host memory."""

from __future__ import annotations

from flame_train.config.schema import Config


def checkpoint_blocks(config: Config) -> str | None:
    """What is wrong with gradient.checkpoint_blocks."""
    if not config.gradient.checkpoint_blocks or config.gradient.checkpointing != "off":
        return None
    return 'expected gradient.checkpointing = "full", "offload" or "mlp" with it, got "off"'


def offload(config: Config) -> str | None:
    """What is wrong with model.offload."""
    asked, checkpointing = config.model.offload, config.gradient.checkpointing
    chosen = asked == "auto" and config.memory.budget  # the budget chooses only what may be streamed
    if asked == "off" or chosen or checkpointing in ("full", "offload"):
        return None
    return (
        f'expected gradient.checkpointing = "full" or "offload" with it, got "{checkpointing}": '
        "a block's weights are gone when its gradient is wanted, unless the block is recomputed"
    )
