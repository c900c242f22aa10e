"""Modules declare their weights; they do not allocate them. Loading or `init` fills the declared specs.

Attribute names are those of the published checkpoints, so `named_specs()` yields checkpoint keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from ...errors import ModelFileError, kind_of
from ..backend import get_backend
from ..capture import note_call, structure_changed
from ..dtype import Array, DType, as_dtype, float16, float32, is_float
from ..ops.reduction.finite import NonFiniteFlags
from ..tensors.tensor import Frozen, Parameter, Tensor
from .fit import check_shapes
from .parts import Completion, Mover
from .quantized import Nf4Weight, QuantizedWeight, ScaledWeight, Storage, StoredNf4
from .spec import ParamSpec, kernel_order
from .state import ModuleState


def compute_copy(weight: Any) -> Any:
    """A loaded weight as networks compute with it: its low-precision copy if an arena keeps one, else itself."""
    return weight.compute_copy if isinstance(weight, Parameter) else weight


def operand(weight: Any, dtype: DType) -> Any:
    """A linear layer's weight as ops take it: decoded to `dtype` if it has 4 bits, else its `compute_copy`."""
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
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note_call(self)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part computes."""
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
        """Every declared weight: its checkpoint name, its module, its attribute and its declaration."""
        for path, module in self.named_modules():
            for attr, spec in module._specs.items():
                yield (f"{path}.{attr}" if path else attr), module, attr, spec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every declared weight's shape by checkpoint name."""
        return {name: spec.shape for name, _, _, spec in self.named_specs()}

    def num_weights(self) -> int:
        """The number of elements in all declared weights."""
        return sum(spec.size for _, _, _, spec in self.named_specs())

    def fusable_groups(self) -> Sequence[Sequence[Any]]:
        """Groups of `Linear` layers of one shape that always see the same input, such as queries, keys and values."""
        return ()

    def bring(self, layer: str) -> None:
        """Sees to it that the weights of a layer of this name can be read, where a network keeps them elsewhere."""

    def quantizable(self) -> Mapping[Any, bool]:
        """The `Linear` layers that may be stored in fewer bits, and whether their inputs may be rounded so, too."""
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
        """Every loaded weight by checkpoint name, a Tensor or a `QuantizedWeight`."""
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
        """Every trainable weight, once, by its first checkpoint name. Frozen ones are left out."""
        seen: set[int] = set()
        for name, weight in self.weights():
            if isinstance(weight, Parameter) and weight.requires_grad and id(weight) not in seen:
                seen.add(id(weight))
                yield name, weight

    def parameters(self) -> Iterator[Parameter]:
        """Every trainable weight: what an optimizer takes."""
        return (weight for _, weight in self.named_parameters())

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


class WeightSource(Protocol):
    """Where weights come from: all shapes at once, values one tensor at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by native name."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor on the host."""


@runtime_checkable
class Nf4Source(WeightSource, Protocol):
    """One that may have tensors in 4 bits already."""

    def nf4(self, name: str) -> StoredNf4 | None:
        """A tensor in 4 bits; None if it has other ones."""


def load(
    module: Module,
    source: WeightSource,
    *,
    dtype: DType | str,
    device: str,
    what: str,
    check_finite: bool = True,
    storage: Storage | None = None,
    mover: Mover | None = None,
) -> None:
    """Streams every declared weight from `source` to `device` in `dtype`; `quantizable` layers as `storage` says.

    Raises `ModelFileError` listing every missing, unexpected and mis-shaped tensor of the component `what` before
    anything is read, and for one that holds whole numbers. Afterwards, with `check_finite`, naming those that hold NaN
    or infinity, in `dtype`. Raises what `Storage.check` does, and TypeError for a source that is none.

    Args:
        module: the declared weights.
        source: where they are read.
        dtype: the dtype they get.
        device: the device they go to.
        what: the component's name in messages.
        check_finite: whether NaN and infinity are refused.
        storage: how quantizable layers are stored; None: as all else.
        mover: takes parts of the module as soon as they are loaded; None: all stays on the device.

    Raises:
        ModelFileError: tensors are missing, unexpected, of another shape, or not finite.
        TypeError: a source that is none.
    """
    if not hasattr(source, "shapes"):
        raise TypeError(f"load: expected what has shapes and read(), such as a SafetensorsFile, got {kind_of(source)}")
    check_shapes(module.shapes(), source.shapes, what)
    backend, wanted = get_backend(device), as_dtype(dtype)
    specs = list(module.named_specs())
    if storage is not None:
        storage.check(device, dtype)
    packed = {} if storage is None else module.quantizable()
    completion = Completion(module, backend, mover)
    broken = NonFiniteFlags(backend, len(specs))  # read at the end, so that reading, copying and checking overlap
    for place, (name, part, attr, spec) in enumerate(specs):
        target = spec.dtype or wanted
        packs = attr == "weight" and part in packed
        if packs and (kept := _kept_nf4(source, name, spec, storage, device)) is not None:
            part.put_weight(attr, kept)
            if check_finite:
                broken.check(place, kept.magnitudes)
            completion.after(place)
            continue
        with np.errstate(over="ignore"):  # numbers too large for the dtype become infinite, and are reported below
            host = kernel_order(_widened(_read(source, name, what, spec), float32 if packs else target))
            given = backend.to_device(host)
            array = _place(part, attr, given.astype(target, copy=False))
        if check_finite and is_float(target):
            broken.check(place, array)
        if packs:  # from the file's own values, so that these are rounded only once
            _place(part, attr, given)
            part.quantize(storage, packed[part])
        completion.after(place)
    completion.end()
    names = [specs[place][0] for place in broken.places()]
    if names:
        beyond = f", or numbers beyond the {np.finfo(wanted).max:g} of fp16" if wanted == float16 else ""
        raise ModelFileError(
            f"{what}: {len(names)} tensor(s) hold NaN or infinity{beyond} ({', '.join(names[:5])}); "
            f"the file is damaged or was saved from a broken run: get another copy{', or take bf16' if beyond else ''}"
        )


def allocate(
    module: Module, *, dtype: DType | str, device: str, storage: Storage | None = None, mover: Mover | None = None
) -> None:
    """Gives every declared weight the memory that `load` would, whatever it holds.

    Args:
        module, dtype, device, storage, mover: as in `load`.
    """
    backend, specs = get_backend(device), list(module.named_specs())
    packed = {} if storage is None else module.quantizable()
    completion = Completion(module, backend, mover)
    for place, (_, part, attr, spec) in enumerate(specs):
        four = len(spec.shape) == 4
        made = backend.empty(
            [spec.shape[i] for i in (0, 2, 3, 1)] if four else spec.shape, spec.dtype or as_dtype(dtype)
        )
        _place(part, attr, made.transpose(0, 3, 1, 2) if four else made)
        if attr == "weight" and part in packed:
            part.quantize(storage, packed[part])
        completion.after(place)
    completion.end()


def _kept_nf4(
    source: WeightSource, name: str, spec: ParamSpec, storage: Storage | None, device: str
) -> Nf4Weight | None:
    """A weight with its bytes as they are.

    Args:
        source: where weights come from.
        name, spec: the weight.
        storage: how it is wanted.
        device: where.

    Returns:
        The weight; None where the source has other bits than `storage` wants.
    """
    if storage is None or storage.format != "nf4" or not isinstance(source, Nf4Source):
        return None
    stored = source.nf4(name)
    return None if stored is None else Nf4Weight.kept(spec.shape, stored, device)


def _read(source: WeightSource, name: str, what: str, spec: ParamSpec) -> np.ndarray[Any, Any]:
    host = source.read(name)
    if host.dtype.kind in "biu" and (spec.dtype is None or is_float(spec.dtype)):
        raise ModelFileError(
            f"{what}: {name} holds whole numbers ({host.dtype}), which only the program that quantised them can read; "
            "get the model in fp32, bf16, fp16 or fp8"
        )
    return host


def _fill(module: Module, attr: str, host: np.ndarray[Any, Any], device: str) -> None:
    _place(module, attr, get_backend(device).to_device(kernel_order(host)))


def _widened(host: np.ndarray[Any, Any], target: DType) -> np.ndarray[Any, Any]:
    """`host` in `target` if it is fp8, which CuPy has no dtype for."""
    return host.astype(target) if is_float(host.dtype) and host.dtype.itemsize == 1 else host


def _trainable(weight: Tensor, name: str) -> Parameter:
    return Parameter(weight.data.astype(float32, copy=False), name)


def _place(module: Module, attr: str, array: Array) -> Array:
    module.put_weight(attr, module._specs[attr].placed(array))
    return array


def _initial(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if spec.init == "ones":
        return np.ones(spec.shape)
    if spec.init == "zeros":
        return np.zeros(spec.shape)
    scale = 0.02 if spec.init == "normal" else 1.0 / math.sqrt(max(1, math.prod(spec.shape[1:])))
    return rng.standard_normal(spec.shape) * scale
