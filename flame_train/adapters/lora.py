"""LoRA (arXiv 2106.09685): a frozen layer plus scale * up(down(x)), with scale = alpha / rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.engine import Parameter, Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import compute_dtype, float32
from flame_train.engine.mode import no_grad
from flame_train.errors import ModelFileError

from .factors import LoraFactors

Layer = nn.Linear | nn.Conv2d
MakeParameter = Callable[[str, np.ndarray[Any, Any], str], Parameter]
"""(name, fp32 values on the host, device) -> the parameter that holds them."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One layer's low-rank update, sitting in the layer's `adapter` slot.

    For a linear layer `down` is (rank, in) and `up` (out, rank); for a convolution `down` is
    (rank, in, kh, kw) with the layer's own stride and padding, and `up` (out, rank, 1, 1).
    """

    down: Parameter
    up: Parameter
    alpha: float
    rank: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __call__(self, layer: Layer, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output with the update; the layer's weight stays as it is."""
        weight, bias = nn.working(layer.weight), nn.working(layer.bias)
        if isinstance(layer, nn.Linear):
            if isinstance(weight, nn.Fp8Weight):
                (y,) = self._packed([weight], [self], x, bias, residual)
                return y
            return F.lora_linear(x, weight, bias, *self.factors(x), self.scale, residual)
        factors = self.factors(x)
        return F.lora_conv2d(x, weight, bias, *factors, self.scale, layer.stride, layer.padding, layout="NHWC")

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """down and up in the activations' dtype."""
        return self.down.working.to(x.dtype), self.up.working.to(x.dtype)

    def together(self, layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...] | None:
        """All layers' outputs for `x` at once, where all have a LoRA of one scale and none a bias."""
        adapters = [layer.adapter for layer in layers]
        loras = [a for a in adapters if isinstance(a, LoraAdapter) and a.scale == self.scale]
        if len(loras) < len(layers) or any(layer.bias is not None for layer in layers):
            return None
        weights = [nn.working(layer.weight) for layer in layers]
        packed = [w for w in weights if isinstance(w, nn.Fp8Weight)]
        if packed:
            alike = len(packed) == len(weights) and len({w.dynamic for w in packed}) == 1
            return self._packed(packed, loras, x) if alike else None
        downs, ups = zip(*[a.factors(x) for a in loras], strict=True)
        outputs: tuple[Tensor, ...] = F.lora_linears(x, weights, downs, ups, self.scale)
        return outputs

    def _packed(
        self, weights: Sequence[nn.Fp8Weight], loras: Sequence[LoraAdapter], x: Tensor, bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The outputs of layers stored in 8 bits, with their updates."""
        stored = [w.codes for w in weights], [w.scales for w in weights]
        downs, ups = zip(*[a.factors(x) for a in loras], strict=True)
        outputs: tuple[Tensor, ...] = F.fp8_lora_linears(
            x, *stored, downs, ups, self.scale, bias, residual, dynamic=weights[0].dynamic
        )
        return outputs

    def delta(self) -> Tensor:
        """The update as a matrix of the weight's shape, in fp32: scale * up @ down."""
        with no_grad():
            flat = self.up.reshape(self.up.shape[0], self.rank) @ self.down.reshape(self.rank, -1)
            return (flat * self.scale).reshape(self.up.shape[0], *self.down.shape[1:])


@dataclass(frozen=True, slots=True)
class Attached:
    """The adapters that sit in a model, by layer name, until `detach` takes them out."""

    model: nn.Module
    adapters: Mapping[str, LoraAdapter]

    def parameters(self) -> list[Parameter]:
        """Every trainable matrix, down before up; those of layers that share an input next to each other.

        An arena lays them out in this order, so that one product can read them all.
        """
        name_of = {id(layer): name for name, layer in _layers(self.model).items()}
        groups = [[name_of[id(layer)] for layer in group] for group in self.model.shared_inputs()]
        joined = [group for group in groups if all(name in self.adapters for name in group)]
        alone = [[name] for name in self.adapters if not any(name in group for group in joined)]
        return [
            parameter
            for group in (*joined, *alone)
            for kind in ("down", "up")
            for parameter in (getattr(self.adapters[name], kind) for name in group)
        ]

    def detach(self) -> None:
        """Empties the slots; the model computes what it did before `attach`."""
        for name, layer in _layers(self.model).items():
            if name in self.adapters and layer.adapter is self.adapters[name]:
                layer.adapter = None

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Each adapted weight's name with W + delta, added in fp32 or better and rounded once to W's dtype."""
        layers = _layers(self.model)
        for name, adapter in self.adapters.items():
            weight = layers[name].weight
            with no_grad():
                weight = weight.given_back(float32) if isinstance(weight, nn.Fp8Weight) else weight
                total = weight.to(compute_dtype(weight.dtype)) + adapter.delta()
                yield f"{name}.weight", total.to(weight.dtype)


def attach(
    model: nn.Module, names: Sequence[str], *, rank: int, alpha: float, seed: int,
    make_parameter: MakeParameter | None = None,
) -> Attached:  # fmt: skip
    """Puts a fresh LoRA into each named layer of a loaded `model`; the output stays, for up is zero.

    down is uniform in +-1 / sqrt(fan in) (Kaiming with a = sqrt 5, as in the reference implementation), drawn
    for each layer from (seed, the layer's name): which other layers take part does not matter. Parameters
    are called `<layer>.lora_down.weight` and `<layer>.lora_up.weight`. Raises KeyError for a name that is no
    layer, ValueError for a layer that already has an adapter or is a convolution in groups or dilated.
    """
    make = make_parameter or _own_parameter
    layers = _layers(model)
    _check_room(layers, names)
    adapters: dict[str, LoraAdapter] = {}
    for name in names:
        layer = layers[name]
        down, up = initial(layer.weight.shape, rank, seed, name)
        device = layer.weight.device
        adapters[name] = layer.adapter = LoraAdapter(
            make(f"{name}.lora_down.weight", down, device),
            make(f"{name}.lora_up.weight", up, device),
            alpha,
            rank,
        )
    return Attached(model, MappingProxyType(adapters))


def attach_factors(model: nn.Module, factors: Mapping[str, LoraFactors], strength: float = 1.0) -> Attached:
    """Puts a finished LoRA into a loaded `model`, `strength` times as strong as it was trained; held in fp32.

    Raises ModelFileError listing the modules that the model does not have or whose shapes differ from its own,
    ValueError for a layer that already has an adapter or is a convolution in groups or dilated.
    """
    layers = _layers(model)
    strangers = [name for name in factors if name not in layers]
    strangers += [name for name, f in factors.items() if name in layers and not _fits(f, layers[name])]
    if strangers:
        raise ModelFileError(
            f"the LoRA does not fit the model: {len(strangers)} of its {len(factors)} modules are not there or have "
            f"other shapes, such as {', '.join(strangers[:5])}; it was trained on another base model"
        )
    _check_room(layers, factors)
    adapters: dict[str, LoraAdapter] = {}
    for name, f in factors.items():
        layer = layers[name]
        out, *taps = layer.weight.shape
        down = f.down.astype(np.float32).reshape(f.rank, *taps)
        up = f.up.astype(np.float32).reshape(out, f.rank, *(1 for _ in taps[1:]))
        device = layer.weight.device
        adapters[name] = layer.adapter = LoraAdapter(
            _own_parameter(f"{name}.lora_down.weight", down, device),
            _own_parameter(f"{name}.lora_up.weight", up, device),
            f.alpha * strength,
            f.rank,
        )
    return Attached(model, MappingProxyType(adapters))


def _fits(factors: LoraFactors, layer: Layer) -> bool:
    """Whether the update has the weight's shape, but for trailing ones: a 1x1 convolution is a linear layer."""
    shape, wanted = factors.weight_shape, tuple(layer.weight.shape)
    longest = max(len(shape), len(wanted))
    return shape + (1,) * (longest - len(shape)) == wanted + (1,) * (longest - len(wanted))


def initial(
    weight_shape: tuple[int, ...], rank: int, seed: int, name: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A layer's first (down, up) in fp32; see `attach`."""
    out, *taps = weight_shape
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    bound = 1.0 / math.sqrt(math.prod(taps))
    down = rng.uniform(-bound, bound, (rank, *taps)).astype(np.float32)
    return down, np.zeros((out, rank, *(1 for _ in taps[1:])), np.float32)


def _own_parameter(name: str, values: np.ndarray[Any, Any], device: str) -> Parameter:
    return Parameter(get_backend(device).put(values), name)


def _check_room(layers: Mapping[str, Layer], names: Iterable[str]) -> None:
    taken = [name for name in names if layers[name].adapter is not None]
    if taken:
        raise ValueError(f"attach: {len(taken)} layer(s) already have an adapter, such as {taken[0]}; detach first")
    chosen = ((name, layers[name]) for name in names)
    odd = [n for n, x in chosen if isinstance(x, nn.Conv2d) and (x.groups != 1 or x.dilation not in (1, (1, 1)))]
    if odd:
        raise ValueError(f"attach: no LoRA for convolutions that are dilated or in groups, such as {odd[0]}")


def _layers(model: nn.Module) -> dict[str, Layer]:
    return {name: part for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
