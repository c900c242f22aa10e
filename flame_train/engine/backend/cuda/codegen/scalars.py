"""Formulas over single numbers as one kernel, by tracing: they are written over an array namespace and called once.

A formula takes a namespace and named numbers, and returns numbers by name. Over CuPy each of its operations is a
launch. Here it is called with a `Trace` as the namespace and `Traced` numbers, which record each operation as a line
of C. These lines are the kernel. Types are promoted as NumPy does, and every operation is rounded separately, so the
results equal those of CuPy's operations bit for bit.

Contract of the kernels: one block; every thread computes everything; the first writes the results, after all have read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ....dtype import Array, DType, bool_, float32, float64, int64
from ..nvrtc import KernelModules, begin, element_name

_THREADS = 256
_TYPES = {bool_: "bool", int64: "long long", float32: "float", float64: "double"}
_PREFIX = {float32: "__f", float64: "__d"}
_WHOLE = {"add": "+", "sub": "-", "mul": "*"}

Formula = Callable[["Trace", dict[str, "Traced"]], Mapping[str, Any]]


class Traced:
    """A number of a traced formula, `text` in C; or, with a `count`, the elements of an array, to be reduced to one.

    Raises `TypeError` where a formula asks for its value.
    """

    __array_ufunc__ = None  # with a NumPy number on the left, Python then calls this class's reflected operator

    def __init__(self, trace: Trace, dtype: DType, text: str, count: str = "") -> None:
        self.trace, self.dtype, self.text, self.count = trace, dtype, text, count

    def astype(self, dtype: DType) -> Traced:
        return self.trace.noted(np.dtype(dtype), self.trace.cast(self, np.dtype(dtype)), self)

    def all(self) -> Traced:
        return self.trace.all(self)

    def __add__(self, other: Any) -> Traced:
        return self.trace.rounded("add", self, other)

    def __radd__(self, other: Any) -> Traced:
        return self.trace.rounded("add", other, self)

    def __sub__(self, other: Any) -> Traced:
        return self.trace.rounded("sub", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return self.trace.rounded("sub", other, self)

    def __mul__(self, other: Any) -> Traced:
        return self.trace.rounded("mul", self, other)

    def __rmul__(self, other: Any) -> Traced:
        return self.trace.rounded("mul", other, self)

    def __truediv__(self, other: Any) -> Traced:
        return self.trace.rounded("div", self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self.trace.rounded("div", other, self)

    def __mod__(self, other: Any) -> Traced:
        return self - self.trace.floor(self / other) * other

    def __pow__(self, other: Any) -> Traced:
        return self.trace.made("pow({0}, {1})", self, other)

    def __rpow__(self, other: Any) -> Traced:
        return self.trace.made("pow({0}, {1})", other, self)

    def __neg__(self) -> Traced:
        return self.trace.made("-{0}", self)

    def __ne__(self, other: object) -> Traced:  # type: ignore[override]  # elementwise, like an array's
        return self.trace.made("{0} != {1}", self, other, dtype=bool_)

    def __lt__(self, other: Any) -> Traced:
        return self.trace.made("{0} < {1}", self, other, dtype=bool_)

    def __le__(self, other: Any) -> Traced:
        return self.trace.made("{0} <= {1}", self, other, dtype=bool_)

    def __gt__(self, other: Any) -> Traced:
        return self.trace.made("{0} > {1}", self, other, dtype=bool_)

    def __ge__(self, other: Any) -> Traced:
        return self.trace.made("{0} >= {1}", self, other, dtype=bool_)

    def __eq__(self, other: object) -> Traced:  # type: ignore[override]  # elementwise, like an array's
        return self.trace.made("{0} == {1}", self, other, dtype=bool_)

    __hash__ = None  # type: ignore[assignment]  # unhashable, like arrays, which compare elementwise too

    def __and__(self, other: Any) -> Traced:
        return self.trace.made("{0} & {1}", self, other)

    def __or__(self, other: Any) -> Traced:
        return self.trace.made("{0} | {1}", self, other)

    def __invert__(self) -> Traced:
        if self.dtype != bool_:
            raise TypeError(f"a traced formula: expected truth values to invert, got {self.dtype.name}")
        return self.trace.made("!{0}", self)

    def __bool__(self) -> bool:
        raise TypeError("a traced formula must not branch on a value: use xp.where")


class Trace:
    """The namespace of a traced formula: records each operation as a line of C."""

    functions: ClassVar[Mapping[str, str]] = {
        "abs": "fabs({0})",
        "cos": "cos({0})",
        "floor": "floor({0})",
        "maximum": "{0} > {1} || {0} != {0} ? {0} : {1}",
        "minimum": "{0} < {1} || {0} != {0} ? {0} : {1}",
        "sign": "({0} > 0) - ({0} < 0)",
    }
    """Functions of the namespace whose result has their operands' common type, in C."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    # ---- what formulas use -----------------------------------------------------------------------------

    def where(self, condition: Traced, a: Any, b: Any) -> Traced:
        dtype = _common(a, b)
        return self.noted(dtype, f"{condition.text} ? {self.cast(a, dtype)} : {self.cast(b, dtype)}", condition)

    def __getattr__(self, name: str) -> Callable[..., Traced]:
        if name not in self.functions:
            raise AttributeError(f"a traced formula: no function {name}")
        return partial(self.made, self.functions[name])

    def clip(self, x: Any, low: Any, high: Any) -> Traced:
        return self.minimum(self.maximum(x, low), high)

    def isfinite(self, x: Traced) -> Traced:
        return self.made("isfinite({0})", x, dtype=bool_)

    def sqrt(self, x: Traced) -> Traced:
        return self.noted(x.dtype, f"{_PREFIX[x.dtype]}sqrt_rn({x.text})", x)

    def sum(self, x: Traced) -> Traced:
        """Returns the sum of an array, in fp64."""
        total = self._over(x, "double", "0.0", f"{{0}} = __dadd_rn({{0}}, {self.cast(x, float64)})")
        return self.noted(float64, f"block_sum<{_THREADS}>({total})")

    def all(self, x: Traced) -> Traced:
        """Tells whether all elements are true; a single number's is its own."""
        if not x.count:
            return x
        return self.noted(bool_, f"!__syncthreads_or({self._over(x, 'bool', 'false', f'{{0}} |= !({x.text})')})")

    # ---- how operations are recorded -------------------------------------------------------------------

    def rounded(self, name: str, a: Any, b: Any) -> Traced:
        """A sum, difference, product or quotient, written so that the compiler does not fuse it with another."""
        dtype = _common(a, b)
        if dtype in _PREFIX:
            return self.made(f"{_PREFIX[dtype]}{name}_rn({{0}}, {{1}})", a, b)
        if name not in _WHOLE:
            raise TypeError(f"a traced formula: expected floats to divide, got {dtype.name}; cast them first")
        return self.made(f"{{0}} {_WHOLE[name]} {{1}}", a, b)

    def made(self, text: str, *operands: Any, dtype: DType | None = None) -> Traced:
        """`text`, a format string over the operands, cast to their common type; that is the result's unless given."""
        common = _common(*operands)
        values = text.format(*(self.cast(x, common) for x in operands))
        return self.noted(dtype or common, values, *operands)

    def noted(self, dtype: DType, text: str, *operands: Any) -> Traced:
        """Records a line that computes a number. An expression over an array stays text until it is reduced."""
        count = next((x.count for x in operands if isinstance(x, Traced) and x.count), "")
        if count:
            return Traced(self, dtype, f"({text})", count)
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {_TYPES[dtype]} {name} = {text};")
        return Traced(self, dtype, name)

    def cast(self, x: Any, dtype: DType) -> str:
        """Returns an operand in C as a number of `dtype`."""
        if isinstance(x, Traced):
            return x.text if x.dtype == dtype else f"({_TYPES[dtype]}){x.text}"
        if not math.isfinite(x):
            raise ValueError(f"a traced formula: expected finite constants, got {x}")
        if dtype.kind == "f":
            return f"{float(dtype.type(x))!r}{'f' if dtype == float32 else ''}"
        return f"({_TYPES[dtype]}){int(x)}"

    def _over(self, x: Traced, kind: str, first: str, line: str) -> str:
        """Records a thread's part of a reduction over an array; returns the name of the variable that holds it."""
        name = f"v{len(self.lines)}"
        loop = f"for (long long i = threadIdx.x; i < {x.count}; i += {_THREADS})"
        self.lines.append(f"{kind} {name} = {first}; {loop} {line.format(name)};")
        return name


def _common(*operands: Any) -> DType:
    """NumPy's result type of an operation; Python numbers take the type of the others."""
    return np.result_type(*(x.dtype if isinstance(x, Traced) else x for x in operands))


@dataclass(frozen=True, slots=True)
class Program:
    """A formula's kernel, to be called with arrays of the names, dtypes and numbers of dims that it was made for."""

    function: Any
    read: tuple[str, ...]
    written: tuple[str, ...]

    def __call__(self, given: Mapping[str, Array], into: Mapping[str, Array]) -> None:
        """Launches the kernel, which writes the formula's results over `given` to the arrays in `into`, by name."""
        sizes = [np.int64(given[n].size) for n in self.read if given[n].ndim]
        args = (*(given[n] for n in self.read), *sizes, *(into[n] for n in self.written))
        self.function((1,), (_THREADS,), args)


def elements(formula: Formula, operands: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A formula over single elements, fp32, as lines of C for the body of a kernel, and its results in C by name.

    `operands` are what the formula is given, by name, each an fp32 expression in C.
    """
    trace = Trace()
    given = {name: trace.noted(float32, text) for name, text in operands.items()}
    results = formula(trace, given)
    return trace.lines, {name: trace.cast(value, float32) for name, value in results.items()}


class Scalars:
    """Makes programs of formulas."""

    elements = staticmethod(elements)

    def __init__(self, modules: KernelModules) -> None:
        self._modules = modules

    def program(self, formula: Formula, given: Mapping[str, Array], into: Mapping[str, Array]) -> Program:
        """The kernel of `formula` over `given`, arrays of any size, that writes its results to 0-d arrays in `into`.

        Each name the formula returns must be in `into`, to whose dtype the value is cast. An array may be in both.
        """
        trace = Trace()
        operands = {n: _operand(trace, i, a) for i, (n, a) in enumerate(given.items())}
        results = formula(trace, operands)
        types = [element_name(a.dtype) if a.dtype != float64 else "double" for a in given.values()]
        parameters = [
            *(f"const {t}* i{i}" for i, t in enumerate(types)),
            *(f"const long long n{i}" for i, a in enumerate(given.values()) if a.ndim),
            *(f"{_TYPES[into[n].dtype]}* o{i}" for i, n in enumerate(results)),
        ]
        writes = [f"*o{i} = {trace.cast(r, into[n].dtype)};" for i, (n, r) in enumerate(results.items())]
        text = _text(parameters, trace.lines, writes)
        return Program(self._modules.generated(text, "scalars"), tuple(given), tuple(results))


def _operand(trace: Trace, i: int, array: Array) -> Traced:
    """Returns an array as a formula sees it: 16-bit numbers as fp32."""
    dtype = array.dtype if array.dtype in _TYPES else float32
    convert = "" if array.dtype in _TYPES else "to_float"
    if array.ndim:
        return Traced(trace, dtype, f"{convert}(i{i}[i])", f"n{i}")
    return trace.noted(dtype, f"{convert}(*i{i})")


def _text(parameters: list[str], lines: list[str], writes: list[str]) -> str:
    body = "".join(f"  {line}\n" for line in [*lines, "__syncthreads();", "if (threadIdx.x) return;", *writes])
    return f"""{begin(False)}#include "backend/cuda/codegen/block_sum.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS}) scalars({", ".join(parameters)}) {{
{body}}}
"""
