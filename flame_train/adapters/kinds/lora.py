"""LoRA (arXiv 2106.09685): a frozen layer plus scale * up(down(x)), with scale = alpha / rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flame_train.adapters.dropping import Drop
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.file_form import ALPHA, DOWN, UP, Arrays, FileForm, alpha_problem, pair_of
from flame_train.engine import Parameter, Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.mode import no_grad

from .kind import AdapterKind, Layer, Make, shrink

_SUFFIXES: Final = {
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora_A.default.weight": DOWN,
    ".lora_B.default.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".lora_linear_layer.down.weight": DOWN,
    ".lora_linear_layer.up.weight": UP,
    "_lora.down.weight": DOWN,
    "_lora.up.weight": UP,
    ".alpha": ALPHA,
}


def pair_problem(arrays: Arrays) -> str:
    """Says what is wrong with LoRA's pair, or its alpha; empty if they fit together."""
    if DOWN not in arrays or UP not in arrays:
        return f"has no {UP if DOWN in arrays else DOWN} matrix"
    down, up = arrays[DOWN].shape, arrays[UP].shape
    if len(down) not in (2, 4) or len(down) != len(up) or any(size != 1 for size in up[2:]):
        return f"has shapes {down} and {up}"
    if down[0] != up[1] or down[0] == 0:
        return f"has rank {down[0]} in its down matrix and {up[1]} in its up matrix"
    return alpha_problem(arrays)


class Lora(AdapterKind):
    """down begins uniform in +-1 / sqrt(fan in) (Kaiming with a = sqrt 5, as the reference implementation), up zero."""

    name = "lora"
    files = FileForm("LoRA", _SUFFIXES, pair_of, pair_problem, inner=(DOWN,))
    has_dropout = True

    def initial(self, layer: Layer, rank: int, alpha: float, rng: np.random.Generator) -> LoraFactors:
        out, *taps = layer.weight.shape
        bound = 1.0 / math.sqrt(math.prod(taps))
        down = rng.uniform(-bound, bound, (rank, *taps)).astype(np.float32)
        return LoraFactors(down, np.zeros((out, rank, *(1 for _ in taps[1:])), np.float32), alpha)

    def from_factors(self, layer: Layer, factors: LoraFactors, strength: float, make: Make) -> LoraAdapter:
        out, *taps = layer.weight.shape
        down = factors.down.astype(np.float32).reshape(factors.rank, *taps)
        up = factors.up.astype(np.float32).reshape(out, factors.rank, *(1 for _ in taps[1:]))
        matrices = make("lora_down.weight", down), make("lora_up.weight", up)
        return LoraAdapter(*matrices, factors.alpha * strength, factors.rank)

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        return rank * (weight_shape[0] + math.prod(weight_shape[1:]))


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One layer's low-rank update, sitting in the layer's `adapter` slot.

    For a linear layer `down` is (rank, in) and `up` (out, rank). For a convolution `down` is (rank, in, kh, kw) with
    the layer's stride and padding, and `up` (out, rank, 1, 1).
    """

    down: Parameter
    up: Parameter
    alpha: float
    rank: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __call__(self, layer: Layer, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the layer's output with the update; the layer's weight stays as it is."""
        return self.apply(layer, x, nn.compute_copy(layer.bias), residual)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Returns the same with another bias than the layer's."""
        weight = nn.operand(layer.weight, x.dtype)
        if isinstance(layer, nn.Linear):
            if isinstance(weight, nn.ScaledWeight):
                (y,) = self._packed([weight], [self], x, bias, residual)
                return y
            return F.lora_linear(x, weight, bias, *self.compute(x), self.scale, residual)
        return F.lora_conv2d(x, weight, bias, *self.compute(x), self.scale, layer.stride, layer.padding, layout="NHWC")

    def dropped(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        return layer.bare(x) + self.low_rank(layer, x, drop)

    def low_rank(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        """Returns scale * up(down(x)) without what `drop` leaves out."""
        down, up = self.compute(x)
        if isinstance(layer, nn.Linear):
            low = F.linear(x, down)
        else:
            low = F.conv2d(x, down, None, layer.stride, layer.padding, layout="NHWC")
        low, kept = drop.hidden(low) * self.scale, drop.module()
        low = low if kept is None else low * kept.to(low.dtype)
        return F.linear(low, up.reshape(up.shape[0], self.rank))

    def norm(self) -> Tensor:
        """Returns the Frobenius norm of the update: |up @ down|^2 is the sum of (up^T up) * (down down^T)."""
        with no_grad():
            up, down = self.up.detach().reshape(-1, self.rank), self.down.detach().reshape(self.rank, -1)
            square = ((up.T @ up) * (down @ down.T)).sum()
            return square.clamp(0.0).sqrt() * abs(self.scale)

    def on(self, layer: Layer) -> LoraAdapter:
        return self

    def limit(self, max_norm: float) -> None:
        shrink(self.norm(), max_norm, (self.up, self.down))

    def parameters(self) -> dict[str, Parameter]:
        return {"lora_down.weight": self.down, "lora_up.weight": self.up}

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns down and up in the activations' dtype."""
        return self.down.compute_copy.to(x.dtype), self.up.compute_copy.to(x.dtype)

    def apply_grouped(self, layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...] | None:
        """Returns all layers' outputs for `x` at once, where all have a LoRA of one scale and none a bias.

        Not of weights in 4 bits: decoded, they lie apart, and copying them together would cost more.
        """
        adapters = [layer.adapter for layer in layers]
        loras = [a for a in adapters if isinstance(a, LoraAdapter) and a.scale == self.scale]
        if len(loras) < len(layers) or any(layer.bias is not None for layer in layers):
            return None
        weights = [nn.compute_copy(layer.weight) for layer in layers]
        packed = [w for w in weights if isinstance(w, nn.QuantizedWeight)]
        if packed:
            scaled = [w for w in packed if isinstance(w, nn.ScaledWeight)]
            return self._by_shape(scaled, loras, x) if scaled and all(map(scaled[0].alike, weights)) else None
        downs, ups = zip(*[a.compute(x) for a in loras], strict=True)
        outputs: tuple[Tensor, ...] = F.lora_linears(x, weights, downs, ups, self.scale)
        return outputs

    def _by_shape(
        self, weights: Sequence[nn.ScaledWeight], loras: Sequence[LoraAdapter], x: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns `_packed` of layers of several shapes, in one product for each shape, as kernels take them."""
        found: dict[int, Tensor] = {}
        for shape in dict.fromkeys(w.shape for w in weights):
            some = [i for i, w in enumerate(weights) if w.shape == shape]
            made = self._packed([weights[i] for i in some], [loras[i] for i in some], x)
            found |= zip(some, made, strict=True)
        return tuple(found[i] for i in range(len(weights)))

    def _packed(
        self,
        weights: Sequence[nn.ScaledWeight],
        loras: Sequence[LoraAdapter],
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the outputs of layers stored in 8 bits, with their updates."""
        stored, first = ([w.data for w in weights], [w.scales for w in weights]), weights[0]
        downs, ups = zip(*[a.compute(x) for a in loras], strict=True)
        outputs: tuple[Tensor, ...] = F.scaled_lora_linears(
            x, *stored, downs, ups, self.scale, bias, residual, dynamic=first.dynamic, rotated=first.rotated
        )
        return outputs

    def delta(self) -> Tensor:
        """Returns the update as a matrix of the weight's shape, in fp32: scale * up @ down."""
        with no_grad():
            flat = self.up.reshape(self.up.shape[0], self.rank) @ self.down.reshape(self.rank, -1)
            return (flat * self.scale).reshape(self.up.shape[0], *self.down.shape[1:])

    def factors(self) -> LoraFactors:
        return LoraFactors(self.down.numpy(), self.up.numpy(), self.alpha)
