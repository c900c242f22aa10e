"""DoRA (arXiv 2402.09353): W' = m (W + scale * up @ down) / |W + scale * up @ down|, with a trained magnitude m.

The norm is that of each input column, or with `wd_on_output` of each output row. No gradient goes through it (section
4.3 of the paper, and PEFT). A layer's input, or output, is multiplied by m / norm, so that the rest is a plain LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from flame_train.adapters.dropping import Drop
from flame_train.adapters.factors import Array, LoraFactors
from flame_train.adapters.file_form import DOWN, UP, Arrays, FileForm, RowNumbers, are_of_rows, pair_of
from flame_train.adapters.merged import KEPT_BELOW, dense
from flame_train.engine import Parameter, Tensor, nn, no_grad, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import float32
from flame_train.settings import field

from .kind import AdapterKind, Layer, Make
from .lora import Lora, LoraAdapter, pair_problem

SCALE: Final = "dora_scale"
VECTOR: Final = "lora_magnitude_vector"
"""LyCORIS' tensor, whose shape tells of which norms it is, and PEFT's and ai-toolkit's, of output rows always."""

_LORA: Final = Lora()
_SMALLEST: Final = float(np.finfo(np.float32).eps)  # a column of zeros has no direction


@dataclass(frozen=True, slots=True)
class DoraFactors:
    """One module's LoRA, and the magnitude: (1, in[, 1, 1]) of input columns or (out, 1[, 1, 1]) of output rows."""

    lora: LoraFactors
    magnitude: Array

    @property
    def kind(self) -> str:
        return "dora"

    @property
    def on_output(self) -> bool:
        """Whether the magnitudes are those of output rows, by ComfyUI's rule."""
        return are_of_rows(self.magnitude.shape, self.weight_shape[0])

    @property
    def rank(self) -> int:
        return self.lora.rank

    @property
    def alpha(self) -> float:
        return self.lora.alpha

    @property
    def arrays(self) -> Mapping[str, Array]:
        return {**self.lora.arrays, SCALE: self.magnitude}

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.lora.weight_shape

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.lora.fits(shape)

    def delta(self, weight: Array, strength: float = 1.0) -> Array:
        """Returns strength * (W' - W), as ComfyUI applies it."""
        base = weight.astype(np.float32)
        total = base + self.lora.delta().reshape(base.shape)
        others = tuple(i for i in range(base.ndim) if i != (0 if self.on_output else 1))
        norm = np.maximum(np.sqrt((total.astype(np.float64) ** 2).sum(others, keepdims=True)), _SMALLEST)
        made = total * (self.magnitude.astype(np.float32).reshape(norm.shape) / norm).astype(np.float32)
        update: Array = np.float32(strength) * (made - base)
        return update


def _array_problem(arrays: Arrays) -> str:
    wrong = pair_problem(arrays)
    magnitudes = [arrays[name] for name in (SCALE, VECTOR) if name in arrays]
    if wrong or len(magnitudes) != 1:
        return wrong or ("has two magnitudes" if magnitudes else "has no magnitude")
    out, width, shape = arrays[UP].shape[0], arrays[DOWN].shape[1], magnitudes[0].shape
    lengths = (out,) if VECTOR in arrays else (out, width)
    if math.prod(shape) not in lengths or max(shape, default=0) != math.prod(shape):
        return f"has a magnitude of shape {shape}, and a weight of {out} rows and {width} columns"
    return ""


def _factors(arrays: Arrays, alpha: float) -> DoraFactors:
    lora, magnitude = pair_of(arrays, alpha), arrays[VECTOR if VECTOR in arrays else SCALE]
    rows = VECTOR in arrays or are_of_rows(magnitude.shape, len(lora.up))
    return DoraFactors(lora, magnitude.reshape(_beside(lora.weight_shape, 0 if rows else 1)))


class Dora(AdapterKind):
    """down and up begin as LoRA's, the magnitudes as the norms of the base weight: the output stays as it is."""

    name = "dora"
    files = FileForm(
        "DoRA",
        {
            **Lora.files.suffixes,
            ".dora_scale": SCALE,
            ".lora_magnitude_vector": VECTOR,
            ".lora_magnitude_vector.weight": VECTOR,
            ".lora_magnitude_vector.default.weight": VECTOR,
            ".magnitude": VECTOR,
        },
        _factors,
        _array_problem,
        inner=(DOWN,),
        network_args={"algo": "lora", "dora_wd": "True"},
        rows=RowNumbers(SCALE, "magnitudes", f".{VECTOR}", "wd_on_output", "norms of input columns"),
    )

    wd_on_output: bool = field(
        False,
        "norms of output rows, as PEFT has them and LyCORIS by default; false: of input columns, right in ComfyUI",
        aka=("wd_on_out", "lora_decompose_output_axis"),
    )

    def initial(self, layer: Layer, rank: int, alpha: float, rng: np.random.Generator) -> DoraFactors:
        axis = self._axis(tuple(layer.weight.shape))
        with no_grad():
            norms = _squares(layer.weight, axis).sqrt().numpy()
        lora = _LORA.initial(layer, rank, alpha, rng)
        return DoraFactors(lora, norms.reshape(_beside(tuple(layer.weight.shape), axis)))

    def from_factors(self, layer: Layer, factors: DoraFactors, strength: float, make: Make) -> DoraAdapter:
        lora, axis = _LORA.from_factors(layer, factors.lora, 1.0, make), 0 if factors.on_output else 1
        magnitude = factors.magnitude.astype(np.float32).reshape(_beside(tuple(layer.weight.shape), axis))
        with no_grad():
            squares = _squares(layer.weight, axis)
        return DoraAdapter(lora, make(SCALE, magnitude), squares, layer.weight, strength)

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        return _LORA.count(weight_shape, rank) + weight_shape[self._axis(weight_shape)]

    def _axis(self, weight_shape: tuple[int, ...]) -> int:
        """Returns the axis that has a magnitude each; ComfyUI takes any magnitudes of one output for its row's."""
        return 0 if self.wd_on_output or weight_shape[0] == 1 else 1


@dataclass(frozen=True, slots=True)
class DoraAdapter:
    """One layer's LoRA with magnitudes, sitting in the layer's `adapter` slot.

    `squares` are the squared norms of the base weight alone; those of the sum follow from small products.
    """

    lora: LoraAdapter
    magnitude: Parameter
    squares: Tensor
    weight: Any
    strength: float

    @property
    def axis(self) -> int:
        return 0 if are_of_rows(tuple(self.magnitude.shape), self.weight.shape[0]) else 1

    def __call__(self, layer: Layer, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self._whole(layer, x, residual)
        if self.strength == 1.0:
            return y
        bare = LoraAdapter(self.lora.down, self.lora.up, 0.0, self.lora.rank)
        return F.lerp(bare(layer, x, residual), y, self.strength)

    def _whole(self, layer: Layer, x: Tensor, residual: Tensor | None) -> Tensor:
        gain = self._gain().to(x.dtype)
        if self.axis == 1:
            return self.lora(layer, rematerialize(F.addcmul, x, x, gain, min_bytes=KEPT_BELOW), residual)
        y = self.lora.apply(layer, x, None)
        y = F.addcmul(y, y, gain)
        for term in (nn.compute_copy(layer.bias), residual):
            y = y if term is None else y + term
        return y

    def dropped(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        gain, scale_of_kept = self._gain(), drop.module()
        gain = (gain if scale_of_kept is None else gain * scale_of_kept).to(x.dtype)
        if self.axis == 1:
            scaled = F.addcmul(x, x, gain)
            return layer.bare(scaled) + self.lora.low_rank(layer, scaled, drop)
        bias = nn.compute_copy(layer.bias)
        y = layer.bare(x) if bias is None else layer.bare(x) - bias
        y = y + self.lora.low_rank(layer, x, drop)
        y = F.addcmul(y, y, gain)
        return y if bias is None else y + bias

    def on(self, layer: Layer) -> DoraAdapter:
        with no_grad():
            return replace(self, weight=layer.weight, squares=_squares(layer.weight, self.axis))

    def limit(self, max_norm: float) -> None:
        """As LyCORIS has it: of what is added before the norm is taken away."""
        self.lora.limit(max_norm)

    def apply_grouped(self, layers: Sequence[Any], x: Tensor) -> tuple[Tensor, ...] | None:
        """Returns None, since each layer has an input, or an output, of its own."""
        return None

    def _gain(self) -> Tensor:
        """Returns m / |W + scale * up @ down| - 1 of each column or row, in fp32: (in,) or (out,)."""
        with no_grad():
            dtype = self.lora.down.compute_copy.dtype
            out = self.weight.shape[0]
            weight = dense(self.weight, dtype).reshape(out, -1)
            down = self.lora.down.compute_copy.reshape(self.lora.rank, -1)
            up = self.lora.up.compute_copy.reshape(out, self.lora.rank)
            if self.axis == 0:
                products = up, weight @ down.T, up @ (down @ down.T)
            else:
                products = down, up.T @ weight, (up.T @ up) @ down
        gain: Tensor = F.dora_gain(self.magnitude.reshape(-1), self.squares, *products, self.lora.scale, self.axis)
        return gain

    def parameters(self) -> Mapping[str, Parameter]:
        return {**self.lora.parameters(), "dora_scale": self.magnitude}

    def delta(self) -> Tensor:
        with no_grad():
            base = dense(self.weight, float32)
            total = base + self.lora.delta().reshape(base.shape)
            others = tuple(i for i in range(base.ndim) if i != self.axis)
            norm = total.square().sum(others, keepdim=True).sqrt().clamp(_SMALLEST)
            return total * (self.magnitude / norm) - base

    def factors(self) -> DoraFactors:
        return DoraFactors(self.lora.factors(), self.magnitude.numpy())


def _squares(weight: Any, axis: int) -> Tensor:
    """Returns the squared norms of a weight's rows (axis 0) or input columns (axis 1), fp32."""
    values = dense(weight, float32)
    return values.square().sum(tuple(i for i in range(values.ndim) if i != axis))


def _beside(weight_shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n if i == axis else 1 for i, n in enumerate(weight_shape))
