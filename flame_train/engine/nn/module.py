"""Modules declare their weights; they do not allocate them. Loading or `init` fills the declared specs.

Attribute names are those of the published checkpoints, so `named_specs()` yields checkpoint keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...errors import kind_of
from ..backend import get_backend
from ..counterparts import MODULE, absent
from ..dtype import Array, DType, as_dtype, float32
from ..step_capture import note_call, structure_changed
from ..tensors.tensor import Frozen, Parameter, Tensor
from .quantized import Nf4Weight, QuantizedWeight, ScaledWeight
from .spec import ParamSpec, kernel_order
from .state_dict import ModuleState


def compute_copy(weight: Any) -> Any:
    """A loaded weight as networks compute with it: its low-precision copy if an arena keeps one, else itself."""
    return weight.compute_copy if isinstance(weight, Parameter) else weight


def operand(weight: Any, dtype: DType) -> Any:
    """Returns a linear layer's weight as ops take it: decoded to `dtype` if it has 4 bits, else its `compute_copy`."""
    return weight.operand(dtype) if isinstance(weight, Nf4Weight) else compute_copy(weight)


class Module(ModuleState):
    """A part of a network. Parts and weights are found by assigning them to attributes, as torch.nn.Module.

    `training` says whether layers that behave differently in training do: `train()` and `eval()` set it.
    """

    _specs: dict[str, ParamSpec]
    _placements: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Module:
        self = super().__new__(cls)
        object.__setattr__(self, "_specs", {})
        object.__setattr__(self, "_placements", 0)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        structure_changed()
        if isinstance(value, ParamSpec):
            self.__dict__.pop(name, None)
            self._specs[name] = value
            return
        if value is None or isinstance(value, Module):
            self._specs.pop(name, None)
        if name in self._specs:
            self.put_weight(name, value)
        else:
            object.__setattr__(self, name, value)

    def put_weight(self, attr: str, weight: Any) -> None:
        """Makes `weight` that of the declaration `attr`; captured steps that used another one are recorded again."""
        structure_changed()
        object.__setattr__(self, "_placements", self._placements + 1)
        object.__setattr__(self, attr, weight)

    def __delattr__(self, name: str) -> None:
        structure_changed()
        declared = self._specs.pop(name, None)
        if declared is None or name in self.__dict__:
            object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_specs", {}):
            raise RuntimeError(f"{type(self).__name__}.{name} is declared but not loaded; call load() or init() first")
        raise absent(type(self).__name__, name, MODULE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note_call(self)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the part computes."""
        raise NotImplementedError(type(self).__name__)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and every part below it, with dotted names; this one's is `prefix`."""
        waiting: list[tuple[str, Module]] = [(prefix, self)]
        while waiting:  # no recursion, whose generators in generators take long in deep networks
            path, module = waiting.pop()
            yield path, module
            below = [(name, part) for name, part in module.__dict__.items() if isinstance(part, Module)]
            waiting += [(f"{path}.{name}" if path else name, part) for name, part in reversed(below)]

    def named_specs(self) -> Iterator[tuple[str, Module, str, ParamSpec]]:
        """Yields every declared weight: its checkpoint name, its module, its attribute and its declaration."""
        for path, module in self.named_modules():
            for attr, spec in module._specs.items():
                yield (f"{path}.{attr}" if path else attr), module, attr, spec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns every declared weight's shape by checkpoint name."""
        return {name: spec.shape for name, _, _, spec in self.named_specs()}

    def num_weights(self) -> int:
        """Returns the number of elements in all declared weights."""
        return sum(spec.size for _, _, _, spec in self.named_specs())

    def fusable_groups(self) -> Sequence[Sequence[Any]]:
        """Groups of `Linear` layers of one shape that always see the same input, such as queries, keys and values."""
        return ()

    def ensure_loaded(self, layer: str) -> None:
        """Sees to it that the weights of a layer of this name can be read, where a network keeps them elsewhere."""

    def quantizable(self, rotated: bool = False) -> Mapping[Any, bool]:
        """The `Linear` layers that may be stored in fewer bits, and whether their inputs may be rounded so, too.

        Args:
            rotated: asks for those whose columns may be rotated for it.
        """
        return {}

    def captured_state(self) -> list[Any]:
        """The objects and numbers that a captured step took from this part: attributes, adapters, trained memory.

        Frozen weights stand in it by the number of times that one was placed, so that it keeps no old one alive.
        """
        state: list[Any] = [self.training]  # of the class before it is set
        for name, value in self.__dict__.items():
            if name == "training" or (name in self._specs and not isinstance(value, Parameter)):
                continue
            state += name, value
            if isinstance(value, Parameter):
                state.append(value.data)
            elif name == "adapter" and hasattr(value, "parameters"):
                state += [p.data for p in value.parameters().values()]
        return state

    def pack_contiguous(self, groups: Sequence[Sequence[Any]] | None = None) -> None:
        """Moves the weights of layers that share an input next to each other, so that one product can read them all.

        `groups` are some of the fusable groups; None: all. Those whose weights are stored in several ways,
        or in 4 bits, stay as they are.
        """
        for layers in self.fusable_groups() if groups is None else groups:
            weights = [layer.weight for layer in layers]
            first = weights[0]
            if isinstance(first, ScaledWeight) and all(map(first.alike, weights)):
                for layer, made in zip(layers, ScaledWeight.joined(weights), strict=True):
                    layer.weight = made
            elif not any(isinstance(weight, QuantizedWeight) for weight in weights):
                block = weights[0].backend.empty((len(layers), *weights[0].shape), weights[0].dtype)
                for layer, place in zip(layers, block, strict=True):
                    place[...] = layer.weight.data
                    layer.weight = Frozen(place)

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yields every loaded weight by checkpoint name, a Tensor or a `QuantizedWeight`."""
        for name, module, attr, _ in self.named_specs():
            yield name, getattr(module, attr)

    def init(self, rng: np.random.Generator, dtype: DType | str = float32, device: str = "cpu") -> None:
        """Fills every spec with random values of a sensible size, made on the host: for tests and small models.

        Raises TypeError for an `rng` that is no generator of NumPy's, such as a seed.
        """
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"init: expected a generator, such as numpy.random.default_rng(0), got {kind_of(rng)}")
        for _, module, attr, spec in self.named_specs():
            _fill(module, attr, _initial(spec, rng).astype(spec.dtype or as_dtype(dtype)), device)

    def requires_grad_(self, value: bool = True) -> Self:
        """Makes every loaded weight a trainable `Parameter` (fp32), or stops it from being trained. As torch.nn.Module.

        A `Parameter` stays the same object, so that an optimizer that has it still trains it after it was frozen for a
        while. A tensor that is the weight of several names stays one. Raises TypeError for quantized weights.
        """
        if value and any(isinstance(weight, QuantizedWeight) for _, weight in self.weights()):
            raise TypeError("requires_grad_: quantized weights are never trained; load them with storage=None")
        made: dict[int, tuple[Tensor, Tensor]] = {}  # holds the old tensors as well, so that their ids stay unique
        for name, module, attr, spec in self.named_specs():
            before = getattr(module, attr)
            if spec.is_buffer:
                continue
            if isinstance(before, Parameter):
                before.requires_grad_(value)
            elif not isinstance(before, QuantizedWeight):
                if id(before) not in made:
                    made[id(before)] = before, _trainable(before, name) if value else Frozen(before.data)
                module.put_weight(attr, made[id(before)][1])
        return self

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields every trainable weight, once, by its first checkpoint name. Frozen ones are left out."""
        seen: set[int] = set()
        for name, weight in self.weights():
            if isinstance(weight, Parameter) and weight.requires_grad and id(weight) not in seen:
                seen.add(id(weight))
                yield name, weight

    def parameters(self) -> Iterator[Parameter]:
        """Yields every trainable weight: what an optimizer takes."""
        return (weight for _, weight in self.named_parameters())

    def zero_grad(self) -> None:
        """Takes the gradient of every trainable weight away. As torch.nn.Module.zero_grad; an optimizer's is faster."""
        for p in self.parameters():
            p.grad = None

    def unload(self) -> None:
        """Drops every weight; the specs stay declared."""
        for _, module, attr, _ in self.named_specs():
            if attr in module.__dict__:
                module.put_weight(attr, None)
                del module.__dict__[attr]


class ModuleList(Module):
    """Parts in a row, named 0, 1, 2, ... An entry may be None where the checkpoint has no weights."""

    def __init__(self, modules: Sequence[Module | None] = ()) -> None:
        self._length = 0
        for m in modules:
            self.append(m)

    @property
    def _items(self) -> list[Any]:
        return [getattr(self, str(i)) for i in range(self._length)]

    def append(self, module: Module | None) -> None:
        """Adds a part at the end."""
        setattr(self, str(self._length), module)
        self._length += 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Sequential(ModuleList):
    """Parts, or functions such as `F.relu`, applied one after another. As torch.nn.Sequential.

    Parts are named 0, 1, 2, ..., the functions counted too. Raises TypeError for what cannot be called.
    """

    def __init__(self, *parts: Any) -> None:
        for part in parts:
            if not callable(part):
                raise TypeError(f"Sequential: expected modules and functions, got {kind_of(part)}")
        super().__init__(parts)

    def forward(self, x: Any) -> Any:
        for part in self:
            x = part(x)
        return x


def _fill(module: Module, attr: str, host: np.ndarray[Any, Any], device: str) -> None:
    put_array(module, attr, get_backend(device).to_device(kernel_order(host)))


def _trainable(weight: Tensor, name: str) -> Parameter:
    return Parameter(weight.data.astype(float32, copy=False), name)


def put_array(module: Module, attr: str, array: Array) -> Array:
    """Makes `array` the weight of the declaration `attr`, and returns it."""
    module.put_weight(attr, module._specs[attr].placed(array))
    return array


def _initial(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if spec.init == "ones":
        return np.ones(spec.shape)
    if spec.init == "zeros":
        return np.zeros(spec.shape)
    scale = 0.02 if spec.init == "normal" else 1.0 / math.sqrt(max(1, math.prod(spec.shape[1:])))
    return rng.standard_normal(spec.shape) * scale
