"""Where a Qwen3 text encoder is found in files."""

from __future__ import annotations

from typing import Final

from flame_train.models.common import keys_qwen3 as qwen3
from flame_train.models.common.loading_text import TextNetwork
from flame_train.models.common.qwen3 import Qwen3, Qwen3Arch

_QWEN3: Final = TextNetwork(
    "Qwen3",
    "qwen_3_4b.safetensors",
    qwen3.prefix_of,
    qwen3.component,
    lambda native, stated: Qwen3(Qwen3Arch.from_shapes(native, stated)),
)
qwen3_part = _QWEN3.part
