"""The signs by which a family's files and LoRAs are identified; each family declares its own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class Network(NamedTuple):
    """A denoiser: `family` is a key of some `Signs.names`, `layout` that of its names, `kind` its component."""

    family: str
    layout: str
    kind: str
    note: str = ""


class Signs(ABC):
    """The signs of one family and of its relatives, known by name alone."""

    names: ClassVar[Mapping[str, str]]
    """Each identifiable model -> its usual name."""
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """A name that stands for several models -> these, or those of them that are this family's."""
    also_reads: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """A model -> others whose LoRAs have the same names, so that a file may be for either."""
    written: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Signs in what trainers write down about the base model -> the model, the narrower before the wider."""
    t5: ClassVar[str] = "text_encoder_3"
    """The component that T5 is."""

    @abstractmethod
    def network(self, shapes: Shapes) -> Network | None:
        """The denoiser with these tensors, if it is of this family or a relative."""

    @abstractmethod
    def lora(self, flat: Shapes) -> str | None:
        """The model of a LoRA by its names, every dot an underscore, and shapes; None if they prove none."""


def dim(shapes: Shapes, name: str, axis: int) -> int | None:
    """The size of a tensor along `axis`; None if there is no such tensor or axis."""
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None


# how the names of both matrices end in any dialect, every dot made an underscore
_DOWN: Final = r".*%s_((lora_down|lora_A|lora_A_default|lora_linear_layer_down)_weight|hada_w1_b)"
_UP: Final = r".*%s_((lora_up|lora_B|lora_B_default|lora_linear_layer_up)_weight|hada_w1_a)"
# LoKr's two matrices, whose sizes multiply; either may be a product of an _a and a _b
_KRON: Final = (r".*%s_lokr_w1(_%s)?", r".*%s_lokr_w2(_%s)?")
# a block of joint attention in diffusers' layout, and its layers whose input is as wide as the model
JOINT: Final = re.compile(r"(base_model_model_|lora_|lycoris_)?(transformer_)?transformer_blocks_\d+_")
_AS_WIDE: Final = (
    "_(attn_(to_[qkv]|add_[qkv]_proj|to_out_0|to_add_out)|ff_(context_)?net_0_proj|norm1_(context_)?linear)"
)


def joint_width(flat: Shapes) -> int | None:
    """The width of a model with joint attention, from its LoRA in diffusers' layout."""
    if not any(JOINT.match(name) for name in flat):
        return None
    return down_width(flat, _AS_WIDE) or (down_width(flat, "_ff_(context_)?net_2") or 0) // 4


def down_width(flat: Shapes, module: str) -> int | None:
    """The input width of the first down matrix of a module whose path ends as the pattern `module` says."""
    return _first(flat, _DOWN % module, 1) or _kron(flat, module, 1)


def up_rows(flat: Shapes, module: str) -> int | None:
    """The rows of the first up matrix of a module whose path ends as the pattern `module` says."""
    return _first(flat, _UP % module, 0) or _kron(flat, module, 0)


def _kron(flat: Shapes, module: str, axis: int) -> int | None:
    """The same of the first LoKr there."""
    one, two = (_first(flat, pattern % (module, "ab"[axis]), axis) for pattern in _KRON)
    return None if one is None or two is None else one * two


def _first(flat: Shapes, name: str, axis: int) -> int | None:
    """The size along `axis` of the first matrix whose name fits the pattern."""
    pattern = re.compile(name)
    return next((shape[axis] for own, shape in flat.items() if len(shape) > 1 and pattern.fullmatch(own)), None)
