"""SD3's context: both CLIPs' hidden states side by side, T5's after them.

Shape letters: B captions, T token positions, E embedding.
"""

from __future__ import annotations

from flame_train.engine import Tensor
from flame_train.engine import functional as F


def joined_context(clip_l_BTE: Tensor, clip_g_BTE: Tensor, t5_BTE: Tensor) -> Tensor:
    """The transformer's context (B, 77 + T, 4096): both CLIPs' states side by side, filled up with zeros, then T5's."""
    clip_BTE = F.cat([clip_l_BTE, clip_g_BTE], dim=-1)
    width = t5_BTE.shape[-1] - clip_BTE.shape[-1]
    return F.cat([F.pad(clip_BTE, (0, width)), t5_BTE], dim=1)
