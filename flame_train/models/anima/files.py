"""Anima's networks from its files. Qwen3 has a separate loader (`loading_qwen3`), which finds it in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.anima import keys
from flame_train.models.anima.text import AdapterArch, LlmAdapter
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Anima(AnimaArch.from_shapes(native, stated))
    if component == "text_conditioner":
        return LlmAdapter(AdapterArch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.qwen_image(), stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated))


ANIMA_FILES: Final = FamilyFiles("anima", keys.COMPONENTS, keys.resolve, {"qwen3-0.6b": "text_encoder"}, _build)
