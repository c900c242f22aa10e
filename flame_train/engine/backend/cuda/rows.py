"""One kernel for what happens along rows: norms, softmax and their gradients, each operand read once.

A program is a list of steps over a row's elements, in order:

- "sum NAME = EXPRESSION", "max ..." and "min ...": a number a row, from every element;
- "let NAME = EXPRESSION": a number a row, from other numbers;
- "row NAME = EXPRESSION": a value an element, kept in registers; `turned(NAME)` is then its pair's other member, (a, b)
  being taken as (-b, a).

Expressions are C over the operands' names, the steps' before, `n` (the row's length) and what `ops/elements.cuh`
defines. Contract of the generated kernels: rows of operands and outputs are neighbours in memory, operands 16-byte
aligned; rows lie at the distances that their leading dims say; a row stays in the registers of up to 1024 threads;
arithmetic and sums are fp32, sums in a fixed order; outputs are assigned, never accumulated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any

import numpy as np

from ...dtype import Array, DType
from .layout import merged
from .nvrtc import KernelModules, element_name
from .programs import Operands, Program

_LOADS = 6  # packets of 16 bytes that a thread has on their way, before a row gets more threads
_HELD = 24  # packets in a thread's registers
_WARP = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """How a row is cut: elements to a packet, threads to a row, packets to a thread."""

    width: int
    threads: int
    packets: int

    @property
    def block(self) -> int:
        """Threads to a block: rows of up to a warp share one, and a longer row has its own."""
        return self.threads if self.threads > _WARP else 128


def shape_of(columns: int, width: int, loads: int, held: int) -> Shape:
    """The cut for rows of `columns` elements, of which a thread loads and holds so many packets for each of its own."""
    packets, limit = -(-columns // width), max(1, min(_LOADS // loads, _HELD // held))
    if packets <= _WARP:
        return Shape(width, 1 << (packets - 1).bit_length(), 1)
    for threads in (32, 64, 128, 256, 512):
        if -(-packets // threads) <= limit:
            return Shape(width, threads, -(-packets // threads))
    return Shape(width, 1024, -(-packets // 1024))


class Rows:
    """Compiles and launches row programs."""

    def __init__(self, cupy: Any, modules: KernelModules) -> None:
        self._xp, self._modules = cupy, modules
        self._function = lru_cache(maxsize=1024)(self._compiled)

    def __call__(
        self, program: Program, operands: Operands, dtypes: Sequence[DType], out: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """The program's rows (..., C) and numbers (R,), in `dtypes`, in this order; or written into `out`."""
        own = {n: self._aligned(a) for n, a in operands.rows.items()}
        *lead, columns = next(iter(own.values())).shape
        count = prod(lead)
        tables = {n: self._aligned(t.array) for n, t in operands.tables.items()}
        made = list(out) or [
            self._xp.empty((*lead, columns) if i < len(program.rows) else (count,), d) for i, d in enumerate(dtypes)
        ]
        if count == 0 or columns == 0:
            return tuple(made)
        placed = [*own.values(), *made[: len(program.rows)]]
        sizes, strides = merged(lead, [[s // a.itemsize for s in a.strides[:-1]] for a in placed])
        step = gcd(columns, *((a.data.ptr & 15) // a.itemsize for a in placed), *(s for row in strides for s in row))
        kinds = tuple((n, a.dtype) for n, a in own.items())
        function, shape = self._function(
            program, kinds, tuple((n, a.dtype) for n, a in tables.items()),
            tuple((n, a.dtype) for n, a in operands.columns.items()), tuple(operands.numbers),
            tuple(a.dtype for a in made), len(sizes), columns, step,
        )  # fmt: skip
        arguments: list[Any] = []
        for a, steps in zip(own.values(), strides, strict=False):
            arguments += [a, *map(np.int64, steps)]
        for n, a in tables.items():
            t = operands.tables[n]
            arguments += [a, np.int32(t.run), np.int32(t.count)]
        arguments += [*operands.columns.values(), *(np.float32(v) for v in operands.numbers.values()), *made]
        arguments += [np.int64(s) for steps in strides[len(own) :] for s in steps]
        arguments += [*map(np.int32, sizes[1:]), np.int32(count), np.int32(columns)]
        per_block = shape.block // shape.threads
        function((-(-count // per_block),), (shape.block,), tuple(arguments))
        return tuple(made)

    def _aligned(self, a: Array) -> Array:
        if a.shape[-1] > 1 and a.strides[-1] != a.itemsize:
            a = self._xp.ascontiguousarray(a)
        return a.copy() if a.data.ptr & 15 else a  # a copy begins where the pool's blocks do

    def _compiled(
        self, program: Program, rows: Names, tables: Names, columns: Names, numbers: tuple[str, ...],
        outputs: tuple[DType, ...], dims: int, length: int, step: int,
    ) -> tuple[Any, Shape]:  # fmt: skip
        stored = [d for _, d in (*rows, *tables)] + list(outputs[: len(program.rows)])
        width = gcd(step, 8 if any(d.itemsize == 2 for d in stored) else 4)
        vectors = sum(s.startswith("row ") for s in program.steps)
        wide = sum(max(1, d.itemsize * width // 16) for _, d in rows)
        shape = shape_of(length, width, wide, wide + vectors * max(1, width // 4))
        text = _Text(program, rows, tables, columns, numbers, outputs, dims, shape).source()
        return self._modules.generated(text, "rows"), shape


Names = tuple[tuple[str, DType], ...]


class _Text:
    """Writes a program down as a kernel."""

    def __init__(
        self, program: Program, rows: Names, tables: Names, columns: Names, numbers: tuple[str, ...],
        outputs: tuple[DType, ...], dims: int, shape: Shape,
    ) -> None:  # fmt: skip
        self.program, self.shape, self.numbers, self.outputs, self.dims = program, shape, numbers, outputs, dims
        self.rows = {n: element_name(d) for n, d in rows}
        self.tables = {n: element_name(d) for n, d in tables}
        self.columns = {n: element_name(d) for n, d in columns}
        self.vectors: list[str] = []
        self.totals = 0

    def source(self) -> str:
        steps = "".join(self._step(s) for s in self.program.steps)
        outputs = self._outputs()
        types = [*self.rows.values(), *self.tables.values(), *map(element_name, self.outputs[: len(self.program.rows)])]
        s = self.shape
        rests = "".join(f"  const int i{d} = rest % size{d}; rest /= size{d};\n" for d in range(self.dims - 1, 0, -1))
        places = f"  int rest = row;\n{rests}  const int i0 = rest;\n"
        return f"""#define FAST {int("float" not in types)}
#include "elements.cuh"
extern "C" __global__ void __launch_bounds__({s.block}) rows({", ".join(self._arguments())}) {{
  const int lane = threadIdx.x % {s.threads}, row = blockIdx.x * {s.block // s.threads} + threadIdx.x / {s.threads};
  const int packets = length / {s.width};
  const bool live = row < count;
  const float n = length;
  __shared__ float shared[{max(1, self.totals)}][32];
{places}{self._loads()}{steps}{outputs}}}
"""

    def _arguments(self) -> list[str]:
        found: list[str] = []
        for name, t in self.rows.items():
            found += [f"const {t}* __restrict__ p_{name}", *self._steps(name)]
        for name, t in self.tables.items():
            found += [f"const {t}* __restrict__ p_{name}", f"const int run_{name}", f"const int count_{name}"]
        found += [f"const {t}* __restrict__ p_{name}" for name, t in self.columns.items()]
        found += [f"const float {name}" for name in self.numbers]
        found += [f"{element_name(d)}* __restrict__ out{i}" for i, d in enumerate(self.outputs)]
        found += [step for i in range(len(self.program.rows)) for step in self._steps(f"out{i}")]
        return [*found, *(f"const int size{d}" for d in range(1, self.dims)), "const int count", "const int length"]

    def _steps(self, name: str) -> list[str]:
        return [f"const long long step_{name}{d}" for d in range(self.dims)]

    def _place(self, name: str) -> str:
        """Where an operand's or output's row begins."""
        return " + ".join(f"i{d} * step_{name}{d}" for d in range(self.dims))

    def _loads(self) -> str:
        w, k = self.shape.width, self.shape.packets
        held = "".join(f"  Packet<{t}, {w}> q_{name}[{k}];\n" for name, t in self.rows.items())
        reads = "".join(
            f"    q_{name}[k] = *reinterpret_cast<const Packet<{t}, {w}>*>(p_{name} + {self._place(name)} + p * {w});\n"
            for name, t in self.rows.items()
        )
        shared = "".join(
            f"  const {t}* const r_{name} = p_{name} + (long long)(row / run_{name} % count_{name}) * length;\n"
            for name, t in self.tables.items()
        )
        single = "".join(f"  const float {name} = live ? to_float(p_{name}[row]) : 0.f;\n" for name in self.columns)
        return held + self._packets(reads) + shared + single

    def _packets(self, body: str) -> str:
        """`body` for every packet of the row that this thread has."""
        return f"""#pragma unroll
  for (int k = 0; k < {self.shape.packets}; k++) {{
    const int p = lane + k * {self.shape.threads};
    if (!live || p >= packets) continue;
{body}  }}
"""

    def _each(self, body: str, before: str = "", after: str = "") -> str:
        """`body` for every element, with the operands it names at hand."""
        w, words = self.shape.width, set(re.findall(r"[A-Za-z_]\w*", body))
        tables = "".join(
            f"    const Packet<{t}, {w}> q_{name} = *reinterpret_cast<const Packet<{t}, {w}>*>(r_{name} + p * {w});\n"
            for name, t in self.tables.items()
            if name in words
        )
        names = [f"const float {n} = to_float(q_{n}[k].e[i]);" for n in self.rows if n in words]
        names += [f"const float {n} = to_float(q_{n}.e[i]);" for n in self.tables if n in words]
        names += [f"const float {n} = v_{n}[k][i];" for n in self.vectors if n in words]
        loop = f"#pragma unroll\n    for (int i = 0; i < {w}; i++) {{ {' '.join(names)} {body} }}\n"
        return self._packets(tables + before + loop + after)

    def _expression(self, text: str) -> str:
        return re.sub(r"turned\((\w+)\)", r"(i & 1 ? v_\1[k][i ^ 1] : -v_\1[k][i ^ 1])", text)

    def _step(self, step: str) -> str:
        head, text = step.split(" = ", 1)
        what, name = head.split()
        text = self._expression(text)
        if what == "let":
            return f"  const float {name} = {text};\n"
        if what == "row":
            body = self._each(f"v_{name}[k][i] = {text};")
            self.vectors.append(name)
            return f"  float v_{name}[{self.shape.packets}][{self.shape.width}];\n{body}"
        how, place = what.capitalize(), self.totals
        self.totals += 1
        own = self._each(f"own_{name} = {how}::of(own_{name}, {text});")
        return f"""  float own_{name} = {how}::none();
{own}  const float {name} = of_all<{how}, {self.shape.threads}>(own_{name}, shared[{place}]);
"""

    def _outputs(self) -> str:
        w, parts = self.shape.width, []
        for i, text in enumerate(self.program.rows):
            t = element_name(self.outputs[i])
            store = f"    store<{t}, {w}>(out{i} + {self._place('out' + str(i))} + p * {w}, result);\n"
            parts.append(self._each(f"result[i] = {self._expression(text)};", f"    float result[{w}];\n", store))
        first = len(self.program.rows)
        if self.program.numbers:
            stores = [f"from_float({text}, out{first + i}[row]);" for i, text in enumerate(self.program.numbers)]
            parts.append(f"  if (live && lane == 0) {{ {' '.join(stores)} }}\n")
        return "".join(parts)
