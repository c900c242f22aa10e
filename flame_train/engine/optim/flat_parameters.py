"""One flat buffer for all trainable values and one for their gradients; parameters are views into them.

Clearing, clipping, updating, saving and reducing are then one operation over one buffer, at addresses that
never move. That lets a captured step be replayed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import Any
from weakref import ref

import numpy as np

from ...errors import ModelFileError, kind_of
from ..autograd.versions import VERSIONS
from ..backend import Backend
from ..dtype import Array, DType, as_dtype, float32
from ..step_capture import structure_changed
from ..tensors.tensor import ComputeCopy, Frozen, Parameter, Tensor
from .matrices import AsMatrices, Matrices, Stack, last_two, stacks_of

_ALIGNMENT = 64
"""Segments start at multiples of this many elements, 256 bytes, as device allocations do."""

Named = Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a parameter lies: elements `start` to `stop` of the flat buffers."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class _Views:
    """A parameter's views of both buffers. It remembers the gradient it gave out, because a user may have kept it."""

    __slots__ = ("_given", "grad", "values")

    def __init__(self, values: Array, grad: Array) -> None:
        self.values, self.grad = values, grad
        self._given: ref[Tensor] | None = None

    def give(self, p: Tensor) -> None:
        """Makes the view `p.grad`, as a new Tensor. An earlier one that is still in use gets a copy of its values."""
        p.grad = None
        kept = self._given() if self._given is not None else None
        if kept is not None and kept.data is self.grad:
            kept.data = self.grad.copy()
        p.grad = made = Tensor(self.grad)
        self._given = ref(made)


class FlatParameters:
    """Packs fp32 leaves into flat buffers and makes their `.data` and `.grad` views into them.

    With `compute_dtype`, a 16-bit dtype, a copy of the values in it is kept as well (`compute_values`), which
    `sync_copies` updates. Parameters then have it as `.compute_copy`.

    Args:
        parameters: a mapping by name, (name, tensor) pairs, or Tensors, named as `named_parameters` says.
        backend: where the buffers are; None: where the first parameter is. Parameters on other devices are moved there.
        compute_dtype: the dtype of the copies that layers compute with; fp32: no copies.
        lr_scale, decay_scale: factors on learning rate and weight decay by name; 1 where a name is absent.

    Raises:
        TypeError: a parameter is `Frozen`, not fp32, or does not require grad.
        ValueError: there is none, a name or a tensor comes twice, or a factor's name is unknown.
    """

    def __init__(
        self,
        parameters: Named,
        backend: Backend | None = None,
        *,
        compute_dtype: DType | str = float32,
        lr_scale: Mapping[str, float] | None = None,
        decay_scale: Mapping[str, float] | None = None,
    ) -> None:
        named = _checked(named_parameters(parameters))
        self.parameters = dict(named)
        self.backend = backend or named[0][1].backend
        self.segments = _lay_out(named)
        self._matrices: dict[AsMatrices, Matrices] = {}
        xp, size = self.backend.xp, _aligned(self.segments[-1].stop)
        self.values: Array = xp.zeros(size, float32)
        self.grads: Array = xp.zeros(size, float32)
        self._views = {s.name: _Views(self.view(self.values, s), self.view(self.grads, s)) for s in self.segments}
        for name, p in named:
            self._pack(name, p)
        low = as_dtype(compute_dtype)
        self.compute_values: Array | None = None if low == float32 else xp.empty(size, low)
        self._give_compute_copies()
        self.lr_scale = self._spread("lr_scale", lr_scale)
        self.decay_scale = self._spread("decay_scale", decay_scale)

    @property
    def size(self) -> int:
        """Elements of each flat buffer, padding between the segments included."""
        return int(self.values.size)

    @property
    def count(self) -> int:
        """The number of trainable values."""
        return sum(s.stop - s.start for s in self.segments)

    @staticmethod
    def view(flat: Array, segment: Segment) -> Array:
        """Returns a segment of a flat buffer in its parameter's shape; writes go through."""
        return flat[segment.start : segment.stop].reshape(segment.shape)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The (start, stop) of the padding between segments, whose values and gradients stay 0."""
        starts = [*(s.start for s in self.segments[1:]), self.size]
        ends = [s.stop for s in self.segments]
        return [(e, s) for e, s in zip(ends, starts, strict=True) if e < s]

    @property
    def valid_lengths(self) -> np.ndarray[Any, Any]:
        """For each 64 elements how many belong to a parameter; the rest is padding at their end. uint8, on the host."""
        result = np.full(self.size // _ALIGNMENT, _ALIGNMENT, np.uint8)
        for start, stop in self.padding:
            result[start // _ALIGNMENT] -= stop - start
        return result

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Parameters of one shape together. A rule asks for them in its `init`: a captured step cannot make them."""
        return stacks_of([(s.shape, s.start) for s in self.segments], self.backend)

    def matrices(self, cut: AsMatrices = last_two) -> Matrices:
        """Returns the parameters as matrices, cut so. As with `stacks`, a rule asks in its `init`."""
        if cut not in self._matrices:
            self._matrices[cut] = Matrices([(s.shape, s.start) for s in self.segments], self.backend, cut)
        return self._matrices[cut]

    def sync_copies(self) -> None:
        """Copies the values to the compute copies. Whoever changes the values must call it."""
        if self.compute_values is not None:
            self.compute_values[...] = self.values
        self.mark_written()

    def mark_written(self) -> None:
        """Notes that values and compute copies were written, so that graphs which saved them refuse to run."""
        VERSIONS.mark_written(self.values)
        if self.compute_values is not None:
            VERSIONS.mark_written(self.compute_values)

    def zero_grad(self) -> None:
        """Clears every gradient; one that was set to None or replaced becomes the arena's view again.

        A gradient that is still in use elsewhere, `g = p.grad`, keeps its values.
        """
        for name, p in self.parameters.items():
            self._views[name].give(p)
        self.grads[...] = 0.0

    def collect_grads(self) -> None:
        """Copies gradients that were replaced, or zeros for those set to None, into the flat buffer.

        Raises `RuntimeError` if a parameter's values were replaced, because the new ones would not be trained. It does
        so for a frozen one, because momentum and weight decay would still move it. Raises `ValueError` for a gradient
        of another shape.
        """
        for name, p in self.parameters.items():
            if not p.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r}: it was frozen after it was packed for the optimizer, which would still move "
                    "it by momentum and weight decay; requires_grad_() it again, or make an optimizer without it"
                )
            views = self._views[name]
            if p.data is not views.values:
                raise RuntimeError(
                    f"parameter {name!r}: its data was replaced after it was packed for the optimizer; "
                    "write into it in place (p.data[...] = new) and give it to one optimizer only"
                )
            if p.grad is None or p.grad.data is not views.grad:
                self._fetch(name, p)

    def _fetch(self, name: str, p: Tensor) -> None:
        """Copies a parameter's own gradient into the flat buffer, zeros if it has none, and gives it the view."""
        views = self._views[name]
        if p.grad is None:
            views.grad[...] = 0.0
        elif p.grad.shape != p.shape:
            raise ValueError(f"parameter {name!r}: expected a gradient of shape {p.shape}, found {p.grad.shape}")
        else:
            views.grad[...] = self._here(p.grad)
        views.give(p)

    # ---- saving ------------------------------------------------------------------------------------

    def split(self, flat: Array) -> dict[str, np.ndarray[Any, Any]]:
        """Returns a flat buffer on the host, by parameter name, in the parameters' shapes; copies."""
        host = self.backend.to_host(flat)
        return {s.name: self.view(host, s).copy() for s in self.segments}

    def join(self, flat: Array, entries: Mapping[str, np.ndarray[Any, Any]], what: str) -> None:
        """Writes what `split` returned into a flat buffer.

        Raises `ModelFileError`, and writes nothing, unless names and shapes are exactly the parameters'.
        """
        wanted = {s.name: s.shape for s in self.segments}
        faults = [f"missing: {n}" for n in wanted if n not in entries]
        faults += [f"unexpected: {n}" for n in entries if n not in wanted]
        faults += [
            f"mis-shaped: {n}: expected {shape}, found {tuple(entries[n].shape)}"
            for n, shape in wanted.items()
            if n in entries and tuple(entries[n].shape) != shape
        ]
        if faults:
            more = [f"... and {len(faults) - 5} more"] if len(faults) > 5 else []
            raise ModelFileError("\n  ".join([f"{what}: does not fit the parameters", *faults[:5], *more]))
        host = np.zeros(self.size, flat.dtype)
        for s in self.segments:
            host[s.start : s.stop] = entries[s.name].reshape(-1)
        flat[...] = self.backend.to_device(host)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the values by parameter name, on the host; copies."""
        return self.split(self.values)

    def load_state(self, entries: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `state` returned. Raises `ModelFileError` if it does not fit."""
        self.join(self.values, entries, "trained weights")
        self.sync_copies()

    # ---- construction ------------------------------------------------------------------------------

    def _pack(self, name: str, p: Tensor) -> None:
        views = self._views[name]
        views.values[...] = self._here(p)
        self._fetch(name, p)
        p.data = views.values
        structure_changed()

    def _give_compute_copies(self) -> None:
        self.sync_copies()
        for s in self.segments:
            p = self.parameters[s.name]
            if isinstance(p, Parameter):
                p._compute_copy = (
                    None if self.compute_values is None else ComputeCopy(self.view(self.compute_values, s), p)
                )

    def _here(self, t: Tensor) -> Array:
        return t.data if t.device == self.backend.name else self.backend.to_device(t.numpy())

    def _spread(self, what: str, factors: Mapping[str, float] | None) -> Array | None:
        """Factors by name as a flat vector; None where all are 1."""
        unknown = [n for n in factors or {} if n not in self.parameters]
        if unknown:
            known = next(iter(self.parameters))
            raise ValueError(f"{what}: no parameter named {unknown[0]!r}; expected names such as {known!r}")
        if not factors or all(f == 1.0 for f in factors.values()):
            return None
        result = self.backend.xp.ones(self.size, float32)
        for s in self.segments:
            result[s.start : s.stop] = factors.get(s.name, 1.0)
        return result


def named_parameters(parameters: Named) -> list[tuple[str, Tensor]]:
    """Returns (name, tensor) pairs; a Tensor without a name has its `.name` or index, the second of a name "name.2"."""
    if isinstance(parameters, Mapping):
        return list(parameters.items())
    pairs: list[tuple[str, Tensor]] = []
    taken: set[str] = set()
    for i, p in enumerate(listed(parameters)):
        pair = p if isinstance(p, tuple) else (_free(getattr(p, "name", "") or str(i), taken), p)
        pairs.append(pair)
        taken.add(pair[0])
    return pairs


def listed(parameters: Iterable[Any]) -> list[Any]:
    """Returns the parameters as a list. Raises TypeError for a Tensor, whose rows would be taken for parameters."""
    if isinstance(parameters, Tensor):
        raise TypeError("optimizer: expected parameters in a list, got a single Tensor")
    return list(parameters)


def _free(name: str, taken: set[str]) -> str:
    """Returns the name; if it is taken, with the smallest number from 2 on that makes it free."""
    return next(n for n in chain([name], (f"{name}.{i}" for i in count(2))) if n not in taken)


def _checked(named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    if not named:
        raise ValueError(
            "optimizer: expected at least one parameter, got none; modules have them after requires_grad_()"
        )
    for name, p in named:
        _check(name, p)
    given: dict[str, list[Any]] = {"name": [n for n, _ in named], "tensor": [id(p) for _, p in named]}
    for what, keys in given.items():
        twice = [named[keys.index(k)][0] for k, n in Counter(keys).items() if n > 1]
        if twice:
            raise ValueError(f"parameter {twice[0]!r}: the same {what} is given twice")
    return named


def _check(name: str, p: Tensor) -> None:
    if isinstance(p, Frozen):
        raise TypeError(f"parameter {name!r} is a Frozen weight, which is never trained; pass Parameters only")
    if not isinstance(p, Tensor):
        raise TypeError(f"parameter {name!r}: expected a Tensor, got {kind_of(p)}")
    if p.dtype != float32:
        raise TypeError(f"parameter {name!r}: trained weights are float32, this one is {p.dtype.name}")
    if not (p.is_leaf and p.requires_grad):
        raise TypeError(f"parameter {name!r}: expected a leaf that requires grad; call requires_grad_() on it")


def _lay_out(named: list[tuple[str, Tensor]]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for name, p in named:
        segments.append(Segment(name, p.shape, start))
        start = _aligned(segments[-1].stop)
    return tuple(segments)


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
