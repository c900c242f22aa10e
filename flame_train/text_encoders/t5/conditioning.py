"""T5's side of a caption's conditioning, for SD3 and Flux. Shape letters: B captions, T token positions, C channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.text_encoders.t5.network import T5Encoder

Ids = np.ndarray[Any, Any]


def encode_prompts(t5: T5Encoder, ids_BT: Ids, mask_BT: Ids | None = None) -> Tensor:
    """T5's embedding of B captions of T ids each, padding included: (B, T, C), 4096 channels for T5-XXL.

    On the encoder's device and in its dtype. There is no mask: SD3 and Flux were trained so, and diffusers, ComfyUI
    and sd-scripts have none by default. Tokens attend to padding too, so the embedding depends on T. With one (True
    up to the end token) they do not; what stands at the padding is then of no use.
    """
    device = t5.shared.weight.device
    ids = tensor(np.ascontiguousarray(ids_BT, np.int32), device=device)
    mask = None if mask_BT is None else tensor(np.ascontiguousarray(mask_BT, np.bool_), device=device)
    out: Tensor = t5(ids, mask)
    return out
