"""Where a Qwen3 text encoder is found in files, and whether it is a family's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape
from flame_train.io.weights import open_weights
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.identify import FAMILY_NAMES, identify
from flame_train.networks.files.part import Part
from flame_train.networks.files.stated import Stated
from flame_train.text_encoders.loading import TextNetwork
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower


def qwen3_part(path: str | Path, component: str = "", files: FamilyFiles | None = None) -> Part:
    """The encoder in a file or folder, as the family of `files` builds it, whose `component` it is.

    Without a family it is Qwen3's own text model. Raises ModelFileError: there is none, it is not whole, or its tensors
    show that it is another Qwen3 than the family's.
    """

    def build(native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        return Qwen3(Qwen3Arch.from_shapes(native, stated)) if files is None else files.build(component, native, stated)

    if files is not None:
        _refuse_others(path, files)
    return TextNetwork("Qwen3", "qwen_3_4b.safetensors", qwen3.prefix_of, qwen3.component, build).part(path, component)


def vision_part(path: str | Path, width: int) -> Part:
    """The vision tower beside a text half of this width, in the same file or folder.

    Raises ModelFileError: there is none, it is not whole, or it is that of another Qwen3-VL.
    """

    def build(native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        arch = VisionArch.from_shapes(native, stated)
        if arch.out_width != width:
            raise ModelFileError(f"{path}: expected a vision tower that makes {width} values, got {arch.out_width}")
        return VisionTower(arch)

    example = "the whole Qwen3-VL, which reads control images"
    tower = TextNetwork("Qwen3-VL", example, qwen3.vision_prefix_of, qwen3.vision_component, build, "vision tower")
    return tower.part(path, "vision")


def _refuse_others(path: str | Path, files: FamilyFiles) -> None:
    """Raises ModelFileError for an encoder that is none of the family's. One of unknown width is a small one."""
    with open_weights(path) as weights:
        found = identify(weights.shapes, weights.metadata)
    if found.kind == "text_encoder" and found.family.startswith("qwen") and found.family not in files.alone:
        wanted = " or ".join(FAMILY_NAMES[name] for name in files.alone)
        raise ModelFileError(
            f"{path}: expected {wanted} for {FAMILY_NAMES[files.family]}, found {FAMILY_NAMES[found.family]}, whose "
            "states it was not made for; name another file"
        )
