"""What a step trains beside the loss of images, so that a model keeps what it knows: each is a file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import Predictions, Preservation

PRESERVATIONS: Table[Preservation] = Table(
    "kind",
    "what is kept as the base model has it; class: a class of things beside the trigger; blank: images without a "
    "caption; slider: no image is learnt, but an axis between two prompts",
    entries_in(__name__, Preservation),
    "off",
)

__all__ = ["PRESERVATIONS", "Predictions", "Preservation"]
