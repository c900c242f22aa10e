"""Weights of a module, streamed from their source to the device one at a time, and those that are not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flame_train.io.weight_files import Kept

from ...errors import ModelFileError, counted, kind_of
from ...io.dtypes import widened
from ..backend import Backend, get_backend
from ..dtype import Array, DType, as_dtype, compute_dtype, float16, float32, is_float
from ..ops.common.conditions import AT_MOST_FP32
from .module import Module, put_array
from .quantized import QuantizedWeight, Storage
from .spec import ParamSpec, kernel_order
from .state_dict import check_shapes


class OffloadOnLoad(Protocol):
    """Takes the weights of parts of a network."""

    @property
    def parts(self) -> Collection[Any]:
        """The parts; none lies in another."""

    def reads(self, part: Any, layer: Module, spec: ParamSpec) -> bool:
        """Tells whether the values of a weight are wanted, or its place in memory alone."""

    def move(self, part: Any) -> None:
        """Takes the weights of a part, which are loaded and packed."""


class LoadedParts:
    """Packs the weights of a network while it is filled, and hands each part over once it has all of them.

    Args:
        module: the network.
        layers: the layer of each of its weights, in order.
        backend: the device that it is filled on.
        mover: takes the parts; None: all stay.
    """

    def __init__(self, module: Any, layers: Sequence[Module], backend: Backend, mover: OffloadOnLoad | None) -> None:
        self._module, self._backend, self._mover = module, backend, mover
        parts = () if mover is None else mover.parts
        self._inside = inside = {id(layer): part for part in parts for _, layer in part.named_modules()}
        owners = [inside.get(id(layer)) for layer in layers]
        self._ends = {id(part): place for place, part in enumerate(owners) if part is not None}
        self._parts = {self._ends[id(part)]: part for part in parts if id(part) in self._ends}
        self._groups: dict[int, list[Sequence[Any]]] = {}  # by part
        self._rest: list[Sequence[Any]] = []  # those in no part, or in several
        for group in module.fusable_groups():
            first, *others = {id(inside.get(id(layer))) for layer in group}
            alone = not others and first in self._ends
            (self._groups.setdefault(first, []) if alone else self._rest).append(group)

    def reads(self, layer: Module, spec: ParamSpec) -> bool:
        """Tells whether the values of a weight are wanted, or its place in memory alone."""
        part = self._inside.get(id(layer))
        return self._mover is None or part is None or self._mover.reads(part, layer, spec)

    def after(self, place: int) -> None:
        """The weight at this place of the network's order is there, as all before it."""
        part = self._parts.get(place)
        if part is not None and self._mover is not None:
            self._pack(self._groups.get(id(part), ()))
            self._mover.move(part)

    def end(self) -> None:
        """All weights are there."""
        self._pack(self._rest)

    def _pack(self, groups: Sequence[Sequence[Any]]) -> None:
        if self._backend.kernels is not None:
            self._module.pack_contiguous(groups)


_UNDER_WAY = 64 << 20  # bytes of weights whose copies are begun ahead of the weight that is put into the module
_THREADS, _PACKET, _BLOCKS = 256, 16, 8  # a block's threads, bytes for each at a time, blocks to a multiprocessor


class NonFiniteFlags:
    """A mark for each of up to `most` arrays."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend = backend
        self._marks = backend.to_device(np.zeros(most, np.int32))

    def check(self, place: int, x: Array) -> None:
        """Marks number `place` if an element of `x` is not finite. `x` must be dense, in any order of dims."""
        mark, k = self._marks[place : place + 1], self._backend.kernels
        if k is None or x.dtype not in AT_MOST_FP32:
            mark |= ~self._backend.xp.isfinite(x.astype(compute_dtype(x.dtype), copy=False)).all()
        elif x.size:
            blocks = min(-(-x.nbytes // (_THREADS * _PACKET)), _BLOCKS * k.multiprocessors)
            args = (x, mark, np.int64(x.size))
            k.launch_header("ops/reduction/finite.cuh", "mark_broken", {"T": x.dtype}, (blocks,), _THREADS, args)

    def places(self) -> Sequence[int]:
        """Returns the numbers that are marked. Waits for the device."""
        found: Sequence[int] = np.flatnonzero(self._backend.to_host(self._marks)).tolist()
        return found


class WeightSource(Protocol):
    """Where weights come from: all shapes at once, values one tensor at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by native name."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Returns one tensor on the host."""


@runtime_checkable
class KeptSource(WeightSource, Protocol):
    """One that may have tensors in fewer bits already."""

    def as_kept(self, name: str) -> Kept | None:
        """Returns a tensor in fewer bits, as it is; None if it is none."""


def load(
    module: Module,
    source: WeightSource,
    *,
    dtype: DType | str,
    device: str,
    what: str,
    check_finite: bool = True,
    storage: Storage | None = None,
    mover: OffloadOnLoad | None = None,
) -> None:
    """Streams every declared weight from `source` to `device` in `dtype`; `quantizable` layers as `storage` says.

    Raises `ModelFileError` listing every missing, unexpected and mis-shaped tensor of the component `what` before
    anything is read, and for one that holds whole numbers. Afterwards, with `check_finite`, naming those that hold NaN
    or infinity, in `dtype`. Raises what `Storage.check` does, and TypeError for a source that is none.

    Args:
        source: where they are read.
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
    if storage is not None:
        storage.check(device, dtype)
    specs = list(module.named_specs())
    filling = _Filling(module, specs, get_backend(device), as_dtype(dtype), check_finite, storage, mover)
    for name, part, attr, spec in specs:
        if filling.packs(part, attr) and (kept := filling.kept(source, name, part, spec)) is not None:
            filling.take_kept(part, attr, kept)
        elif not filling.reads(part, spec):
            filling.take_place(part, attr, spec)
        else:
            filling.take(part, attr, spec, _read(source, name, what, spec))
    names = filling.end()
    if names:
        beyond = f", or numbers beyond the {np.finfo(dtype).max:g} of fp16" if as_dtype(dtype) == float16 else ""
        raise ModelFileError(
            f"{what}: NaN or infinity{beyond} in {counted(len(names), 'tensor')} ({', '.join(names[:5])}); "
            f"the file is damaged or was saved from a broken run: get another copy{', or take bf16' if beyond else ''}"
        )


class _Filling:
    """Puts weights into a module in its order: some are under way while those before are converted and checked.

    Args:
        module, check_finite, storage, mover: as in `load`.
        specs: what the module declares.
        backend: the device.
        dtype: of weights that declare none.
    """

    def __init__(
        self,
        module: Module,
        specs: Sequence[tuple[str, Module, str, ParamSpec]],
        backend: Backend,
        dtype: DType,
        check_finite: bool,
        storage: Storage | None,
        mover: OffloadOnLoad | None,
    ) -> None:
        self._backend, self._dtype, self._check_finite, self._storage = backend, dtype, check_finite, storage
        self._names = [name for name, *_ in specs]
        self._packed = {} if storage is None else module.quantizable(storage.rotated)
        self._completion = LoadedParts(module, [layer for _, layer, *_ in specs], backend, mover)
        self._flags = NonFiniteFlags(backend, len(self._names))  # read at the end: nothing waits for the device before
        self._under_way = deque[tuple[int, Callable[[], None]]]()  # bytes, and what puts the weight into the module
        self._place = self._bytes = 0

    def packs(self, part: Module, attr: str) -> bool:
        """Tells whether a weight is stored in fewer bits."""
        return attr == "weight" and part in self._packed

    def reads(self, part: Module, spec: ParamSpec) -> bool:
        """Tells whether the values of a weight are wanted."""
        return self._completion.reads(part, spec)

    def take_place(self, part: Module, attr: str, spec: ParamSpec) -> None:
        """Gives the next weight memory, whose contents nobody reads."""
        self._put_until(0)
        with np.errstate(all="ignore"):  # what lies there is converted all the same
            _put_place(self._backend, part, attr, spec, self._dtype)
            if self.packs(part, attr):
                part.quantize(self._storage, self._packed[part])
        self._next()

    def take(self, part: Module, attr: str, spec: ParamSpec, host: np.ndarray[Any, Any]) -> None:
        """Starts copying the next weight."""
        target = spec.dtype or self._dtype
        packs = self.packs(part, attr)
        with np.errstate(over="ignore"):  # numbers too large for the dtype become infinite, and are reported at the end
            wide = _widened(host, float32 if packs else target)
        arrived = self._backend.begin_upload(wide)

        def put() -> None:
            k = self._backend.kernels
            given = kernel_order(arrived(), np.ascontiguousarray if k is None else k.contiguous)
            with np.errstate(over="ignore"):
                array = put_array(part, attr, given.astype(target, copy=False))
            if self._check_finite and is_float(target):
                self._flags.check(self._place, array)
            if packs:  # from the file's own values, so that these are rounded only once
                put_array(part, attr, given)
                part.quantize(self._storage, self._packed[part])
            self._next()

        self._under_way.append((wide.nbytes, put))
        self._bytes += wide.nbytes
        self._put_until(_UNDER_WAY)

    def kept(self, source: WeightSource, name: str, part: Module, spec: ParamSpec) -> QuantizedWeight | None:
        """Returns a weight with its bytes as they are; None where it is to be rounded."""
        stored = source.as_kept(name) if isinstance(source, KeptSource) else None
        if self._storage is None or stored is None:
            return None
        storage = self._storage.of_layer(self._packed[part])
        return QuantizedWeight.kept(spec.shape, stored, storage, self._backend)

    def take_kept(self, part: Module, attr: str, kept: QuantizedWeight) -> None:
        """Puts the next weight, with its bytes as the file has them."""
        self._put_until(0)
        part.put_weight(attr, kept)
        if self._check_finite:
            self._flags.check(self._place, kept.magnitudes)
        self._next()

    def end(self) -> list[str]:
        """Puts what is under way, and returns the names of weights that are not finite."""
        self._put_until(0)
        self._completion.end()
        return [self._names[place] for place in self._flags.places()]

    def _put_until(self, most: int) -> None:
        """Puts the weights that were begun first, until at most so many bytes are under way."""
        while self._under_way and self._bytes > most:
            size, put = self._under_way.popleft()
            put()
            self._bytes -= size

    def _next(self) -> None:
        self._completion.after(self._place)
        self._place += 1


def allocate(
    module: Module,
    *,
    dtype: DType | str,
    device: str,
    storage: Storage | None = None,
    mover: OffloadOnLoad | None = None,
) -> None:
    """Gives every declared weight the memory that `load` would, whatever it holds.

    Args:
        module, dtype, device, storage, mover: as in `load`.
    """
    backend, specs = get_backend(device), list(module.named_specs())
    packed = {} if storage is None else module.quantizable(storage.rotated)
    completion = LoadedParts(module, [layer for _, layer, *_ in specs], backend, mover)
    for place, (_, part, attr, spec) in enumerate(specs):
        _put_place(backend, part, attr, spec, as_dtype(dtype))
        if attr == "weight" and part in packed:
            part.quantize(storage, packed[part])
        completion.after(place)
    completion.end()


def _put_place(backend: Backend, part: Module, attr: str, spec: ParamSpec, dtype: DType) -> None:
    """Gives a weight memory in the order that loading leaves it in."""
    four = len(spec.shape) == 4
    made = backend.empty([spec.shape[i] for i in (0, 2, 3, 1)] if four else spec.shape, spec.dtype or dtype)
    put_array(part, attr, made.transpose(0, 3, 1, 2) if four else made)


def _read(source: WeightSource, name: str, what: str, spec: ParamSpec) -> np.ndarray[Any, Any]:
    host = source.read(name)
    if host.dtype.kind in "biu" and (spec.dtype is None or is_float(spec.dtype)):
        raise ModelFileError(
            f"{what}: {name} holds whole numbers ({host.dtype}), which only the program that quantised them can read; "
            "get the model in fp32, bf16, fp16 or fp8"
        )
    return host


def _widened(host: np.ndarray[Any, Any], target: DType) -> np.ndarray[Any, Any]:
    """Returns `host` in `target` if it is fp8, which CuPy has no dtype for."""
    return widened(host, target) if is_float(host.dtype) and host.dtype.itemsize == 1 else host
