"""CLIP's side of a caption's conditioning, for SDXL, SD3 and Flux: hidden states and pooled text.

Shape letters: B captions, N windows a caption, T token positions, E embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.text_encoders.clip.network import ClipTextEncoder

END_TOKEN = 49407

Ids = np.ndarray[Any, Any]


def encode_prompts(
    clip_l: ClipTextEncoder, bigg: ClipTextEncoder, ids_l_BNT: Ids, ids_g_BNT: Ids
) -> tuple[Tensor, Tensor]:
    """The context (B, 75 N + 2, 2048) of both encoders side by side, and bigG's pooled text (B, 1280).

    The ids are those of the two tokenizers: CLIP-L pads with its end token, bigG with 0. See `encode_windows`.
    """
    states_l, _ = encode_windows(clip_l, ids_l_BNT)
    states_g, pooled = encode_windows(bigg, ids_g_BNT)
    if pooled is None:
        raise ValueError("encode_prompts: the second encoder must have a text projection, this one has none")
    return F.cat([states_l, states_g], dim=-1), pooled


def encode_windows(encoder: ClipTextEncoder, ids_BNT: Ids, unprojected: bool = False) -> tuple[Tensor, Tensor | None]:
    """One encoder's hidden states (B, 75 N + 2, E) and pooled text (B, E) of B captions, each in N windows of 77 ids.

    Both are on the encoder's device and in its dtype. The hidden states are the last but one, not normalised. A
    caption of several windows keeps the first begin token and the last end token. Its pooled text is that of its
    first window, by the convention of sd-scripts, which most published LoRAs follow. An encoder without a text
    projection has no pooled text, or with `unprojected` its raw one.
    """
    device = encoder.text_model.final_layer_norm.weight.device
    ids = np.ascontiguousarray(ids_BNT, np.int32)
    return encode_windows_on(
        encoder, tensor(ids, device=device), tensor(end_positions(ids), device=device), unprojected
    )


def encode_windows_on(
    encoder: ClipTextEncoder, ids_BNT: Tensor, ends_BN: Tensor, unprojected: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`encode_windows` of ids and positions of end tokens that are on the device already: device work alone."""
    B, N, T = ids_BNT.shape
    states, pooled = encoder(ids_BNT.reshape(B * N, T), ends_BN.reshape(B * N), unprojected)
    first = None if pooled is None else pooled.reshape(B, N, -1)[:, 0]
    return _joined(states, N), first


def end_positions(ids_BT: Ids) -> Ids:
    """The position of each row's first end token: its words end there, and padding begins."""
    found: Ids = np.argmax(ids_BT == END_TOKEN, axis=-1).astype(np.int32)
    return found


def _joined(states: Tensor, windows: int) -> Tensor:
    """(B * N, T, E) -> (B, N (T - 2) + 2, E): windows in a row, no begin or end tokens between them."""
    T, E = states.shape[1:]
    if windows == 1:
        return states
    rows = states.reshape(-1, windows, T, E)
    B = rows.shape[0]
    words = rows[:, :, 1:-1].reshape(B, windows * (T - 2), E)
    return F.cat([rows[:, 0, :1], words, rows[:, -1, -1:]], dim=1)
