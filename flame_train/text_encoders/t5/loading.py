"""Where the T5 encoder is found in files."""

from __future__ import annotations

from typing import Final

from flame_train.text_encoders.loading import TextNetwork
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_T5: Final = TextNetwork(
    "T5",
    "t5xxl_fp16.safetensors",
    t5.prefix_of,
    t5.component,
    lambda native, stated: T5Encoder(T5Arch.from_shapes(native, stated)),
)
t5_part = _T5.part
