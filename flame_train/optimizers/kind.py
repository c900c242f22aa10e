"""What an optimizer is to a training run: its keys, and the rule that it makes of them."""

from __future__ import annotations

from flame_train.engine.optim import Rule
from flame_train.settings import Entry


class OptimizerKind(Entry):
    """One optimizer: its fields are keys of `[optimizer]` beside `lr`."""

    def rule(self) -> Rule:
        """The last transform of the chain, which makes the update from the gradient."""
        raise NotImplementedError
