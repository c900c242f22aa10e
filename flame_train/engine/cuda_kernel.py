"""`cuda_kernel`: a kernel written in CUDA C as a function over tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..errors import ShapeError, kind_of
from .autograd.versions import VERSIONS
from .backend import Backend
from .backend.cuda.nvrtc import begin, compiler_log
from .dtype import DType, bfloat16, bool_, float16, float32, float64, int32, int64, uint8, uint32
from .mode import mode
from .tensors.tensor import Tensor

Sizes: TypeAlias = "int | Sequence[int]"

_TYPES: dict[str, DType] = {
    "float": float32,
    "double": float64,
    "int": int32,
    "long long": int64,
    "unsigned": uint32,
    "unsigned int": uint32,
    "unsigned char": uint8,
    "bool": bool_,
    "fp16": float16,
    "bf16": bfloat16,
}
"""Types of a kernel's parameters in C. fp16 and bf16 are read by to_float(x) and written by from_float(f, x)."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter: a pointer to `dtype`, `written` unless it is const, or a number of it."""

    name: str
    dtype: DType
    pointer: bool
    written: bool


class CudaKernel:
    """A kernel: `kernel(grid, block, *args, shared_bytes=0)` launches it. See `cuda_kernel`."""

    def __init__(self, source: str, name: str) -> None:
        self.name, self._source = name, source
        self.parameters = _parameters(source, name)
        exported = re.sub(r'(?<!extern "C" )__global__', 'extern "C" __global__', source)
        self._text = f'{begin(False)}#line 1 "{name}.cu"\n{exported}'
        log = compiler_log(self._text)
        if f"{name}.cu(" in log:  # a mistake of this text, not of the compiler's surroundings
            raise SyntaxError(_told(log, name, source))

    def __repr__(self) -> str:
        return f"<CUDA kernel {self.name}>"

    def __call__(
        self, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared_bytes: int = 0
    ) -> None:
        """Queues the kernel on the GPU of its tensors: `grid` blocks of `block` threads, up to three numbers each.

        Raises TypeError or ShapeError for arguments that are not those of the kernel's parameters. Raises RuntimeError
        for tensors elsewhere than on one GPU, and where a gradient would be lost. Raises SyntaxError, with the
        compiler's message, at the first launch of a source that does not compile.
        """
        given = [self._checked(p, a) for p, a in zip(self.parameters, self._counted(args), strict=True)]
        backend = self._backend(given)
        sizes = [_three("grid", grid), _three("block", block)]
        options = {"shared_mem": shared_bytes} if shared_bytes else {}
        self._function(backend)(*sizes, tuple(given), **options)
        for p, a in zip(self.parameters, given, strict=True):
            if p.written:
                VERSIONS.mark_written(a)

    def _counted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(args) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise TypeError(f"{self.name}: expected {len(self.parameters)} arguments ({names}), got {len(args)}")
        return args

    def _checked(self, p: _Parameter, value: Any) -> Any:
        """Returns a tensor's array, or a number in the parameter's type."""
        if not p.pointer:
            if not isinstance(value, (bool, int, float, np.generic)):
                raise TypeError(f"{self.name}: expected a number for {p.name!r}, got {kind_of(value)}")
            return p.dtype.type(value)
        if isinstance(value, Tensor):
            if p.written and value.requires_grad and mode().grad:
                raise RuntimeError(f"{self.name}: {p.name!r} is written and requires grad; give its detach()")
            value = value.data
        if not hasattr(value, "flags") or not hasattr(value, "dtype"):
            raise TypeError(f"{self.name}: expected a Tensor for {p.name!r}, got {kind_of(value)}")
        if value.dtype != p.dtype:
            raise TypeError(f"{self.name}: expected {p.dtype.name} for {p.name!r}, got {value.dtype.name}")
        if not value.flags.c_contiguous:
            raise ShapeError(f"{self.name}: expected {p.name!r} contiguous in memory; give its contiguous()")
        return value

    def _backend(self, given: Sequence[Any]) -> Backend:
        found = {
            id(b): b for b in [Tensor(a).backend for p, a in zip(self.parameters, given, strict=True) if p.pointer]
        }
        backends = list(found.values())
        if len(backends) != 1 or backends[0].kernels is None:
            where = ", ".join(b.name for b in backends) or "no tensor"
            raise RuntimeError(f"{self.name}: expected tensors on one GPU, got {where}")
        return backends[0]

    def _function(self, backend: Backend) -> Any:
        try:
            return backend.kernels.generated(self._text, self.name)
        except Exception as e:
            if type(e).__name__ not in ("CompileException", "NVRTCError"):
                raise
            raise SyntaxError(_told(str(e), self.name, self._source)) from e


def cuda_kernel(source: str, name: str) -> CudaKernel:
    """Returns the kernel `name` of a text in CUDA C, as a function over tensors: `kernel(grid, block, *args)`.

    It is compiled at its first launch, and kept, on disk too. Where NVRTC and CUDA's headers are installed it is
    also compiled here, without a GPU, so that mistakes are told at once. Launches join the engine's other work in
    order and may be captured. Parameters are numbers, or pointers to float, double, int, long long, unsigned,
    unsigned char, bool, fp16 or bf16. Tensors of that dtype are given to them. Those that are not const count as
    written. A kernel has no gradient of its own: `flame.primitive` gives it one. Raises ValueError for a text
    without such a kernel, or with a parameter of another type. Raises SyntaxError, with the compiler's message and
    the line, for one that does not compile.

    >>> scale = cuda_kernel('''
    ... __global__ void scale(const float* x, float* y, float by, int n) {
    ...   int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...   if (i < n) y[i] = by * x[i];
    ... }''', "scale")
    >>> [p.name for p in scale.parameters]
    ['x', 'y', 'by', 'n']
    """
    if not isinstance(source, str):
        raise TypeError(f"cuda_kernel: expected CUDA C as text, got {kind_of(source)}")
    return CudaKernel(source, name)


def _parameters(source: str, name: str) -> tuple[_Parameter, ...]:
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name)}\s*\(([^)]*)\)", bare)
    if found is None:
        raise ValueError(f"cuda_kernel: no __global__ function {name!r} in the source")
    return tuple(_parameter(name, text) for text in found[1].split(",") if text.strip())


def _parameter(kernel: str, text: str) -> _Parameter:
    words = re.sub(r"\b__restrict__\b|\bvolatile\b", " ", text).replace("*", " * ").split()
    constant, words = "const" in words, [w for w in words if w != "const"]
    kind, name = " ".join(w for w in words[:-1] if w != "*"), words[-1]
    if kind not in _TYPES or words.count("*") > 1:
        raise ValueError(
            f"cuda_kernel: {kernel}'s parameter {text.strip()!r}: expected a number or a pointer of one of "
            f"{', '.join(_TYPES)}"
        )
    pointer = "*" in words
    return _Parameter(name, _TYPES[kind], pointer, pointer and not constant)


def _three(what: str, sizes: Sizes) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not 1 <= len(given) <= 3 or any(not isinstance(n, int) or n < 1 for n in given):
        raise ShapeError(f"cuda_kernel: expected one to three numbers of at least 1 as {what}, got {sizes!r}")
    return given


def _told(message: str, name: str, source: str) -> str:
    """Returns the compiler's errors, each with its line of the source."""
    lines = source.split("\n")
    problems = []
    for number, text in re.findall(rf"{re.escape(name)}\.cu\((\d+)\):\s*(error[^\n]*)", message):
        at = int(number)
        shown = lines[at - 1].strip() if 0 < at <= len(lines) else ""
        problems.append(f"line {at}: {text}\n    {shown}")
    return f"{name}: the kernel does not compile\n" + ("\n".join(problems) or message)
