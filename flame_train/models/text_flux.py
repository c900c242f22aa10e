"""Flux's text conditioning: CLIP-L's pooled text for the whole picture, T5's embedding as context (see `text_t5`).

Shape letters: B captions, T token positions, C channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor

from .clip import ClipTextEncoder
from .text_sdxl import end_positions

Ids = np.ndarray[Any, Any]


def pooled_text(clip_l: ClipTextEncoder, ids_BT: Ids) -> Tensor:
    """CLIP-L's normalised state at the end token of B captions of 77 ids each, not projected: (B, 768)."""
    ids = np.ascontiguousarray(ids_BT, np.int32)
    device = clip_l.text_model.final_layer_norm.weight.device
    _, pooled = clip_l(tensor(ids, device=device), tensor(end_positions(ids), device=device), unprojected=True)
    assert isinstance(pooled, Tensor)
    return pooled
