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


def encode_clips(
    clip_l: ClipTextEncoder, clip_g: ClipTextEncoder, ids_l_BT: Ids, ids_g_BT: Ids
) -> tuple[Tensor, Tensor]:
    """What both CLIPs make of B captions: hidden states (B, 77, 2048) and pooled text (B, 2048), CLIP-L's first.

    Hidden states are the last but one, not normalised. CLIP-L's pooled text is projected where its file has a
    projection and raw where it has none, as in diffusers and the reference implementation.
    """
    found = [_encode(clip, ids) for clip, ids in ((clip_l, ids_l_BT), (clip_g, ids_g_BT))]
    states, pooled = zip(*found, strict=True)
    return F.cat(list(states), dim=-1), F.cat(list(pooled), dim=-1)


def joined_context(clip_BTE: Tensor, t5_BTE: Tensor) -> Tensor:
    """The transformer's context (B, 77 + T, 4096): the CLIPs' states, filled up with zeros, then T5's."""
    width = t5_BTE.shape[-1] - clip_BTE.shape[-1]
    return F.cat([F.pad(clip_BTE, (0, width)), t5_BTE], dim=1)


def _encode(clip: ClipTextEncoder, ids_BT: Ids) -> tuple[Tensor, Tensor]:
    ids = np.ascontiguousarray(ids_BT, np.int32)
    device = clip.text_model.final_layer_norm.weight.device
    states, pooled = clip(tensor(ids, device=device), tensor(end_positions(ids), device=device), unprojected=True)
    assert pooled is not None
    return states, pooled
