"""SD3's text conditioning: both CLIPs' hidden states side by side, T5's after them, and both pooled texts.

Shape letters: B captions, T token positions, E embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F

from .clip import ClipTextEncoder
from .text_sdxl import end_positions

Ids = np.ndarray[Any, Any]


def encode_clip(clip: ClipTextEncoder, ids_BT: Ids) -> tuple[Tensor, Tensor]:
    """What one CLIP makes of B captions: hidden states (B, 77, E), the last but one, not normalised, and pooled text.

    The pooled text is projected where the encoder's file has a projection and raw where it has none (some CLIP-L
    files), as in diffusers and the reference implementation.
    """
    ids = np.ascontiguousarray(ids_BT, np.int32)
    device = clip.text_model.final_layer_norm.weight.device
    states, pooled = clip(tensor(ids, device=device), tensor(end_positions(ids), device=device), unprojected=True)
    assert pooled is not None
    return states, pooled


def joined_context(clip_l_BTE: Tensor, clip_g_BTE: Tensor, t5_BTE: Tensor) -> Tensor:
    """The transformer's context (B, 77 + T, 4096): both CLIPs' states side by side, filled up with zeros, then T5's."""
    clip_BTE = F.cat([clip_l_BTE, clip_g_BTE], dim=-1)
    width = t5_BTE.shape[-1] - clip_BTE.shape[-1]
    return F.cat([F.pad(clip_BTE, (0, width)), t5_BTE], dim=1)
