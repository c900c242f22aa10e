"""What SD3 and Flux take of a CLIP: hidden states and pooled text of one window of a caption.

Shape letters: B captions, T token positions, E embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor

from .clip import ClipTextEncoder
from .text_sdxl import end_positions

Ids = np.ndarray[Any, Any]


def encode_clip(clip: ClipTextEncoder, ids_BT: Ids) -> tuple[Tensor, Tensor]:
    """What one CLIP makes of B captions: hidden states (B, 77, E), the last but one, not normalised, and pooled text.

    The pooled text of CLIP-G is projected. CLIP-L's is raw: a projection in its file is left out when it is loaded.
    """
    ids = np.ascontiguousarray(ids_BT, np.int32)
    device = clip.text_model.final_layer_norm.weight.device
    states, pooled = clip(tensor(ids, device=device), tensor(end_positions(ids), device=device), unprojected=True)
    assert pooled is not None
    return states, pooled
