"""Captions in windows, from token ids on the host: of one of SDXL's encoders, and of both side by side."""

from __future__ import annotations

import numpy as np

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.text_encoders.clip.encoder import encode_windows_on, end_positions


def encode_windows(encoder, ids_BNT, unprojected=False):
    ids = np.ascontiguousarray(ids_BNT, np.int32)
    return encode_windows_on(encoder, tensor(ids), tensor(end_positions(ids)), unprojected)


def encode_prompts(clip_l, bigg, ids_l_BNT, ids_g_BNT):
    states_l, _ = encode_windows(clip_l, ids_l_BNT)
    states_g, pooled = encode_windows(bigg, ids_g_BNT)
    return F.cat([states_l, states_g], dim=-1), pooled
