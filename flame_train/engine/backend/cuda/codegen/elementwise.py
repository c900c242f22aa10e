"""Elementwise kernels from expressions: operands of any shapes that broadcast, any strides, mixed dtypes, read once.

The expressions are C over operands' names and what `dtypes.cuh` defines. Statements may precede the value:
"float s = sigmoid(input); s * (1 - s)". Contract of the generated kernels: arithmetic is fp32. Each output is assigned,
never accumulated, and written once. No output may overlap an input other than element for element. Packets of up to 16
bytes are moved where all operands allow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ....dtype import Array, DType
from ..nvrtc import KernelModules, begin, element_name
from .broadcast_plan import Operand, Shape, dense_strides, plan

_THREADS = 256

Signature = tuple[DType, Shape, tuple[int, ...], int]
"""What a kernel depends on of an array: dtype, shape, strides in bytes, address modulo 16."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An operand in the text. `steps` are by the layout's dims: 0 if broadcast, 1 if contiguous, 2 for another stride.

    The elements of a `dense` one have the same index as those of the result; `single` ones are fetched one by one.
    """

    name: str
    type: str
    steps: tuple[int, ...]
    dense: bool
    single: bool


@dataclass(frozen=True, slots=True)
class _Ready:
    """A kernel for given shapes and dtypes, its grid and constant arguments, and the memory order of new outputs."""

    function: Any
    grid: tuple[int]
    constants: tuple[Any, ...]
    order: tuple[int, ...]


class Elementwise:
    """Compiles and launches; remembers the last few thousand combinations of expressions, shapes and dtypes."""

    def __init__(self, cupy: Any, modules: KernelModules) -> None:
        self._xp, self._modules = cupy, modules
        self._ready = lru_cache(maxsize=4096)(self._prepare)

    def __call__(
        self,
        expressions: tuple[str, ...],
        operands: Mapping[str, Any],
        dtypes: tuple[DType, ...],
        shape: Shape | None = None,
        out: tuple[Array, ...] = (),
    ) -> tuple[Array, ...]:
        """Returns the expressions' values, in new arrays of `dtypes` and `shape` (the operands' own), or in `out`.

        Operands are arrays or numbers. Raises `ValueError` if shapes do not broadcast.

        Args:
            expressions: C, one for each result.
            operands: arrays and numbers by name.
            dtypes: the results' dtypes.
            shape: the results' shape; None: that which the operands broadcast to.
            out: arrays for the results, or none.
        """
        arrays = {n: v for n, v in operands.items() if hasattr(v, "dtype")}
        numbers = {n: v for n, v in operands.items() if n not in arrays}
        signatures = tuple(_signature(a) for a in (*arrays.values(), *out))
        if shape is None:
            shape = _common(tuple(s[1] for s in signatures))
        ready = self._ready(expressions, tuple(arrays), tuple(numbers), signatures, dtypes, shape, len(out))
        made = out or tuple(self._new(shape, ready.order, d) for d in dtypes)
        if 0 not in shape:
            values = tuple(np.float32(v) for v in numbers.values())
            ready.function(ready.grid, (_THREADS,), (*arrays.values(), *values, *made, *ready.constants))
        return made

    def _new(self, shape: Shape, order: tuple[int, ...], dtype: DType) -> Array:
        if order == tuple(range(len(shape))):
            return self._xp.empty(shape, dtype)
        made = self._xp.empty([shape[i] for i in order], dtype)
        return made.transpose([order.index(i) for i in range(len(shape))])

    def _prepare(
        self,
        expressions: tuple[str, ...],
        names: tuple[str, ...],
        numbers: tuple[str, ...],
        signatures: tuple[Signature, ...],
        dtypes: tuple[DType, ...],
        shape: Shape,
        given: int,
    ) -> _Ready:
        seen = [Operand(s[1], tuple(b // s[0].itemsize for b in s[2]), s[0].itemsize, s[3]) for s in signatures]
        new = len(dtypes) if not given else 0
        widest = max((d.itemsize for d in dtypes), default=1)
        layout = plan(shape, seen, new, widest, given)
        types = [element_name(s[0]) for s in signatures] + [element_name(d) for d in dtypes[:new]]
        labels = [*names, *(f"out{i}" for i in range(len(expressions)))]
        dense = dense_strides(layout.sizes)
        places = [
            _Place(label, t, _steps(row), row == dense, layout.across and row != dense)
            for label, t, row in zip(labels, types, layout.strides, strict=True)
        ]
        count = math.prod(shape)
        packets = -(-count // layout.width)
        text = _source(expressions, places, len(names), numbers, layout.width, layout.wide)
        integer = np.int64 if layout.wide else np.int32
        constants = [integer(count), *map(integer, layout.sizes)]
        for place, row in zip(places, layout.strides, strict=True):
            constants += [integer(s) for step, s in zip(place.steps, row, strict=True) if step == 2]
        grid = (max(1, -(-packets // _THREADS)),)
        return _Ready(self._modules.generated(text, "elementwise"), grid, tuple(constants), layout.order)


def _signature(a: Array) -> Signature:
    return a.dtype, a.shape, a.strides, a.data.ptr & 15


@lru_cache(maxsize=4096)
def _common(shapes: tuple[Shape, ...]) -> Shape:
    return np.broadcast_shapes(*shapes)


def _steps(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(s, 2) if s >= 0 else 2 for s in strides)


# ---- the kernel's text ---------------------------------------------------------------------------------------------


def _source(
    expressions: Sequence[str], places: Sequence[_Place], inputs: int, numbers: Sequence[str], width: int, wide: bool
) -> str:
    """The kernel: one packet a thread, and the elements after the last whole packet by threads of the last block."""
    ins, outs = places[:inputs], places[inputs:]
    dims = len(places[0].steps)
    arguments = [
        *(f"const {p.type}* __restrict__ p_{p.name}" for p in ins),
        *(f"const float v_{n}" for n in numbers),
        *(f"{p.type}* __restrict__ p_{p.name}" for p in outs),
        "const I elements",
        *(f"const I size{d}" for d in range(dims)),
        *(f"const I s_{p.name}{d}" for p in places for d, step in enumerate(p.steps) if step == 2),
    ]
    whole = dims > 1 and not any(p.single for p in places)
    remainder = "" if width == 1 or whole else _remainder(ins, outs, numbers, width)
    return f"""{begin(all(p.type != "float" for p in places))}typedef {"long long" if wide else "int"} I;
{_value_function(expressions, [p.name for p in ins], numbers)}
extern "C" __global__ void __launch_bounds__({_THREADS}) elementwise({", ".join(arguments)}) {{
  const I packets = elements / {width}, packet = blockIdx.x * (I){_THREADS} + threadIdx.x;
  if (packet < packets) {{
    const I first = packet * {width};
{_places(places, "first")}{"".join(_load(p, width) for p in ins)}{_fetch(ins, width)}
    float {", ".join(f"r_{p.name}[{width}]" for p in outs)};
#pragma unroll
    for (int i = 0; i < {width}; i++) of_one({_call(ins, outs, numbers, width)});
{"".join(_store(p, width) for p in outs)}  }}
{remainder}}}
"""


def _value_function(expressions: Sequence[str], names: Sequence[str], numbers: Sequence[str]) -> str:
    """Returns the expressions as a function of one element of each operand."""
    arguments = [f"float& r{i}" for i in range(len(expressions))] + [f"const float {n}" for n in (*names, *numbers)]
    lines = []
    for i, e in enumerate(expressions):
        before, _, last = e.rpartition(";")
        lines.append(f"  {{ {before}{';' if before else ''} r{i} = {last}; }}\n")
    return f"__device__ __forceinline__ void of_one({', '.join(arguments)}) {{\n{''.join(lines)}}}"


def _held(p: _Place, width: int) -> int:
    """Returns how many elements of an operand belong to a packet of the result: one if it is broadcast."""
    return width if p.steps[-1] or p.single else 1


def _places(places: Sequence[_Place], first: str) -> str:
    """Lines that compute where operands have the element `first` of the result, o_<name>, and its coordinates c<dim>.

    Operands that are fetched an element at a time are found by the coordinates alone, which are left out if all are
    dense.
    """
    lines = []
    if not all(p.dense for p in places):
        lines.append(f"I rest = {first};")
        lines += [f"I c{d} = rest % size{d}; rest /= size{d};" for d in range(len(places[0].steps) - 1, 0, -1)]
        lines.append("I c0 = rest;")
    lines += [f"const I o_{p.name} = {first if p.dense else _offset(p)};" for p in places if not p.single]
    return "".join(f"    {line}\n" for line in lines)


def _offset(p: _Place) -> str:
    """Returns where an operand has the element at the coordinates c<dim>."""
    terms = [f"c{d}" if step == 1 else f"c{d} * s_{p.name}{d}" for d, step in enumerate(p.steps) if step]
    return " + ".join(terms) or "0"


def _load(p: _Place, width: int) -> str:
    if p.single:
        return f"    Packet<{p.type}, {width}> q_{p.name};\n"
    packet = f"const Packet<{p.type}, {_held(p, width)}>"
    return f"    {packet} q_{p.name} = *reinterpret_cast<{packet}*>(p_{p.name} + o_{p.name});\n"


def _fetch(ins: Sequence[_Place], width: int) -> str:
    """Returns the elements of a packet that goes on from row to row, of operands that are not dense."""
    single = [p for p in ins if p.single]
    if not single:
        return ""
    taken = "".join(f"      q_{p.name}.e[i] = p_{p.name}[{_offset(p)}];\n" for p in single)
    onward = "c0++;"
    for d in range(1, len(ins[0].steps)):
        onward = f"if (++c{d} == size{d}) {{ c{d} = 0; {onward} }}"
    return f"""#pragma unroll
    for (int i = 0; i < {width}; i++) {{
{taken}      {onward}
    }}
"""


def _store(p: _Place, width: int) -> str:
    return f"    store<{p.type}, {width}>(p_{p.name} + o_{p.name}, r_{p.name});\n"


def _call(ins: Sequence[_Place], outs: Sequence[_Place], numbers: Sequence[str], width: int) -> str:
    taken = [f"to_float(q_{p.name}.e[{'i' if _held(p, width) > 1 else '0'}])" for p in ins]
    return ", ".join([*(f"r_{p.name}[i]" for p in outs), *taken, *(f"v_{n}" for n in numbers)])


def _remainder(ins: Sequence[_Place], outs: Sequence[_Place], numbers: Sequence[str], width: int) -> str:
    """Returns the elements after the last whole packet, by threads of the last block."""
    at = {p.name: _offset(p) if p.single else f"o_{p.name}" for p in (*ins, *outs)}
    taken = [f"to_float(p_{p.name}[{at[p.name]}])" for p in ins]
    results = ", ".join(f"r_{p.name}" for p in outs)
    stores = " ".join(f"from_float(r_{p.name}, p_{p.name}[{at[p.name]}]);" for p in outs)
    return f"""  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < elements - packets * {width}) {{
    const I element = packets * {width} + threadIdx.x;
{_places([*ins, *outs], "element")}    float {results};
    of_one({", ".join([results, *taken, *(f"v_{n}" for n in numbers)])});
    {stores}
  }}
"""
