"""Text encoders that run inside the step: token ids come in a batch, and the conditioning is made of them there.

The denoiser cannot tell them from encoders whose arrays come from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine.dtype import DType, is_float
from flame_train.networks.block_network import BlockNetwork
from flame_train.text_encoders.encoder import TextEncoder

KEPT = "kept"
"""What a batch calls the factor (1,) on an encoder's arrays: 0 for a sample for which it is dropped, else 1."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningEncoder:
    """A loaded text encoder, which makes its arrays anew in each step."""

    encoder: TextEncoder
    network: BlockNetwork

    def conditioned(self, arrays: Mapping[str, Tensor], dtype: DType) -> dict[str, Tensor]:
        """Returns a batch's arrays with those that it makes, in `dtype`, in place of its token ids.

        A batch without its token ids has what it makes already, and stays as it is.
        """
        prefix = f"{self.encoder.key}."
        own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        if not own:
            return dict(arrays)
        mask = own.pop(KEPT, None)
        outputs = self.encoder.encode(self.network, own)
        conditioning = {name: a.to(dtype) for name, a in outputs.items() if is_float(a.dtype)}
        if mask is not None:
            conditioning = {
                name: a * mask.to(dtype).reshape(-1, *(1 for _ in a.shape[1:])) for name, a in conditioning.items()
            }
        return {name: a for name, a in arrays.items() if not name.startswith(prefix)} | outputs | conditioning


def tokens_of(
    encoders: Sequence[TextEncoder], text: str, dropped: frozenset[str] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Says what a batch has of a caption for encoders that run in the step.

    Args:
        dropped: the keys of those that are dropped for this sample; None: a text of which none is ever dropped.

    Returns:
        Token ids, and for encoders that are dropped now and then the factor on their arrays.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for encoder in encoders:
        arrays |= encoder.tokens(text)
        if dropped is not None and encoder.dropout:
            arrays[f"{encoder.key}.{KEPT}"] = np.array([encoder.key not in dropped], np.float32)
    return arrays
