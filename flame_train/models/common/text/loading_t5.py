"""Where the T5 encoder is found in files."""

from __future__ import annotations

from typing import Final

from flame_train.models.common.text import keys_t5 as t5
from flame_train.models.common.text.loading_text import TextNetwork
from flame_train.models.common.text.t5 import T5Arch, T5Encoder

_T5: Final = TextNetwork(
    "T5",
    "t5xxl_fp16.safetensors",
    t5.prefix_of,
    t5.component,
    lambda native, stated: T5Encoder(T5Arch.from_shapes(native, stated)),
)
t5_part = _T5.part
