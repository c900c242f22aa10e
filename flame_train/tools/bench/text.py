"""Text encoders that `bench step` trains: random weights, and token ids in place of their arrays in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np

from flame_train.models.common.model import Model
from flame_train.networks.blocks import BlockNetwork, Checkpointing
from flame_train.text_encoders.running import RunningEncoder, tokens_of

from .models import Arrays

_CAPTION: Final = "a photograph of a lighthouse on a rock above the sea"


def running_encoders(
    model: Model, trained: Collection[str], checkpointing: Checkpointing, fill: Callable[[BlockNetwork], None]
) -> tuple[RunningEncoder, ...]:
    """The encoders of the keys `trained`, their weights filled in by `fill`."""
    found = []
    for encoder in model.encoders(trained):
        network = encoder.part.build()
        assert isinstance(network, BlockNetwork)
        network.checkpointing = checkpointing
        fill(network)
        found.append(RunningEncoder(encoder, network))
    return tuple(found)


def with_token_ids(arrays: Mapping[str, np.ndarray[Any, Any]], running: Collection[RunningEncoder]) -> Arrays:
    """A batch's arrays, with the token ids of one caption for the arrays that `running` make."""
    size = len(next(iter(arrays.values())))
    made = {name for each in running for name in each.encoder.outputs}
    made |= {f"{name}_rows" for name in made}
    ids = tokens_of([each.encoder for each in running], _CAPTION)
    kept = {name: array for name, array in arrays.items() if name not in made}
    return kept | {name: np.stack([array] * size) for name, array in ids.items()}
