"""The marks by which a family's files and LoRAs are told, and those that rule it out; each family declares its own.

Of all families exactly one has marks that fit a file, in whatever order they are asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class Mark(NamedTuple):
    """A denoiser by the names of its tensors: all of `has` are there, none of `lacks`.

    `model` is a key of some `Marks.names`, `layout` that of its names, `kind` its component. A name that ends in `*`
    stands for those that begin so.
    """

    model: str
    layout: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    kind: str = "transformer"
    note: str = ""

    def fits(self, shapes: Shapes) -> bool:
        """Says whether these tensors are so called."""
        return all(_has(shapes, name) for name in self.has) and not any(_has(shapes, name) for name in self.lacks)


class Width(NamedTuple):
    """The input width of the first layer whose path ends as the pattern `layer` says."""

    layer: str
    width: int

    def fits(self, flat: Shapes) -> bool:
        """Says whether the LoRA has such a layer, and it is so wide."""
        return _down_width(flat, self.layer) == self.width


class Ratio(NamedTuple):
    """The rows of such a layer, as a multiple of its input width."""

    layer: str
    rows: float

    def fits(self, flat: Shapes) -> bool:
        """Says whether the LoRA has such a layer, and it has so many rows."""
        rows, width = _up_rows(flat, self.layer), _down_width(flat, self.layer)
        return rows is not None and width is not None and rows == self.rows * width


class LoraMark(NamedTuple):
    """A LoRA by its names, every dot an underscore: some fits the pattern `has`, none `lacks`.

    All of `sizes` fit, and none of `unless`.
    """

    model: str
    has: str = ""
    lacks: str = r"(?!)"
    sizes: tuple[Width | Ratio, ...] = ()
    unless: tuple[Width | Ratio, ...] = ()

    def fits(self, flat: Shapes, names: str) -> bool:
        """Says whether the LoRA with these tensors, whose `names` stand a line each, is so called and so large."""
        return (
            re.search(self.has, names, re.MULTILINE) is not None
            and re.search(self.lacks, names, re.MULTILINE) is None
            and all(size.fits(flat) for size in self.sizes)
            and not any(size.fits(flat) for size in self.unless)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The marks of one family and of its relatives, known by name alone.

    Attributes:
        names: each identifiable model -> its usual name.
        groups: a name that stands for several models -> those of them that are this family's.
        also_reads: a model -> others whose LoRAs have the same names, so that a file may be for either.
        networks: how its denoiser is told.
        variant: from a mark's model and the tensors to the model and a note; None: they are no denoiser.
        loras: how its LoRAs are told, the narrower before the wider.
        written: patterns of what trainers write down about the base model -> the model, the narrower before the wider.
        unwritten: a pattern of what rules that out.
        t5: the component that T5 is.
    """

    names: Mapping[str, str]
    networks: tuple[Mark, ...]
    loras: tuple[LoraMark, ...]
    written: Mapping[str, str]
    unwritten: str = r"(?!)"
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also_reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variant: Callable[[str, Shapes], tuple[str, str] | None] | None = None
    t5: str = "text_encoder_3"

    def network(self, shapes: Shapes) -> Mark | None:
        """Returns the mark that fits these tensors, with the model and the note that its variant has."""
        mark = next((mark for mark in self.networks if mark.fits(shapes)), None)
        if mark is None or self.variant is None:
            return mark
        variant = self.variant(mark.model, shapes)
        return None if variant is None else mark._replace(model=variant[0], note=variant[1])

    def lora(self, flat: Shapes, names: str) -> str | None:
        """Returns the model of a LoRA by its names, every dot an underscore, and shapes; None if they prove none."""
        return next((mark.model for mark in self.loras if mark.fits(flat, names)), None)

    def by_metadata(self, text: str) -> str | None:
        """Returns the model that trainers wrote down, in lower case; None if it is none of these."""
        if re.search(self.unwritten, text):
            return None
        return next((model for pattern, model in self.written.items() if re.search(pattern, text)), None)


def _has(shapes: Shapes, name: str) -> bool:
    """Says whether there is a tensor of that name, or one that begins so."""
    return any(own.startswith(name[:-1]) for own in shapes) if name.endswith("*") else name in shapes


def dim(shapes: Shapes, name: str, axis: int) -> int | None:
    """Returns the size of a tensor along `axis`; None if there is no such tensor or axis."""
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None


# how the names of both matrices end in any dialect, every dot made an underscore
_DOWN: Final = r".*%s_((lora_down|lora_A|lora_A_default|lora_linear_layer_down)_weight|hada_w1_b)"
_UP: Final = r".*%s_((lora_up|lora_B|lora_B_default|lora_linear_layer_up)_weight|hada_w1_a)"
# LoKr's two matrices, whose sizes multiply; either may be a product of an _a and a _b
_KRON: Final = (r".*%s_lokr_w1(_%s)?", r".*%s_lokr_w2(_%s)?")
JOINT: Final = r"(base_model_model_|lora_|lycoris_)?(transformer_)?transformer_blocks_\d+_"
"""How the name of a layer begins that is in a block of joint attention in diffusers' layout."""
# its layers whose input is as wide as the model, and those whose input is four times as wide
_AS_WIDE: Final = (
    "_(attn_(to_[qkv]|add_[qkv]_proj|to_out_0|to_add_out)|ff_(context_)?net_0_proj|norm1_(context_)?linear)"
)
_FOUR_TIMES: Final = "_ff_(context_)?net_2"


def joint_loras(model: str, width: int, lacks: str = r"(?!)") -> tuple[LoraMark, LoraMark]:
    """Returns the marks of a LoRA of blocks of joint attention in diffusers' layout, by the model's width."""
    sizes = Width(_AS_WIDE, width), Width(_FOUR_TIMES, 4 * width)
    one, other = (LoraMark(model, f"^{JOINT}", lacks, (size,)) for size in sizes)
    return one, other


def _down_width(flat: Shapes, module: str) -> int | None:
    """Returns the input width of the first down matrix of a module whose path ends as the pattern `module` says."""
    return _first(flat, _DOWN % module, 1) or _kron(flat, module, 1)


def _up_rows(flat: Shapes, module: str) -> int | None:
    """Returns the rows of the first up matrix of a module whose path ends as the pattern `module` says."""
    return _first(flat, _UP % module, 0) or _kron(flat, module, 0)


def _kron(flat: Shapes, module: str, axis: int) -> int | None:
    one, two = (_first(flat, pattern % (module, "ab"[axis]), axis) for pattern in _KRON)
    return None if one is None or two is None else one * two


def _first(flat: Shapes, name: str, axis: int) -> int | None:
    """Returns the size along `axis` of the first matrix whose name fits the pattern."""
    pattern = re.compile(name)
    return next((shape[axis] for own, shape in flat.items() if len(shape) > 1 and pattern.fullmatch(own)), None)
