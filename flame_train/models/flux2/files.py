"""FLUX.2's networks from its files. Qwen3 has a separate loader (`loading_qwen3`), which finds it in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.flux2 import keys
from flame_train.models.flux2.transformer import Flux2, Flux2Arch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Flux2(Flux2Arch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.flux2(), stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated))


_ALONE: Final = {"qwen3-4b": "text_encoder", "qwen3-8b": "text_encoder"}
FLUX2_FILES: Final = FamilyFiles("flux2", keys.COMPONENTS, keys.resolve, _ALONE, _build)
