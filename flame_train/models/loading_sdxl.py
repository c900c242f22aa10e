"""SDXL's networks from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape

from .clip import ClipArch, ClipTextEncoder
from .family_files import FamilyFiles
from .keys import sdxl
from .unet_sdxl import UNet, UNetArch
from .vae import Vae, VaeArch


def _build(component: str, native: Mapping[str, Shape]) -> nn.Module:
    if component == "unet":
        return UNet(UNetArch.from_shapes(native))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native))
    return ClipTextEncoder(ClipArch.from_shapes(native, "quick_gelu" if component == "text_encoder" else "gelu"))


SDXL_FILES: Final = FamilyFiles("sdxl", sdxl.COMPONENTS, sdxl.resolve, {}, _build)
