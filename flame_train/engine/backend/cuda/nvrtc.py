"""Our own kernels: *.cu files by element type, and generated text.

They are compiled on first use, and cached on disk by CuPy, unless an installed package brings them compiled.
"""

from __future__ import annotations

import ctypes
import re
import threading
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import EnvironmentFault
from ...dtype import DType, bfloat16, bool_, float16, float32, int8, int32, int64, uint8
from .launch_hooks import LaunchHooks
from .made_once import MadeOnce
from .nvidia_libraries import header_directory, load
from .prebuilt import PrebuiltKernels

_ENGINE = Path(__file__).parents[2]

_TYPES = {float32: "float", float16: "__half", bfloat16: "__nv_bfloat16"}

ELEMENT_TYPES = frozenset(_TYPES)

_SHARED_BYTES = 48 << 10  # shared memory that every kernel may use without asking

_INCLUDE = re.compile(r'#include "([\w/]+\.cuh)"')

_GENERATED = {float32: "float", float16: "fp16", bfloat16: "bf16", bool_: "bool", int32: "int", int64: "long long"}

_GENERATED |= {uint8: "e4m3", int8: "int8"}

TEXT_OPTIONS = ("-std=c++17",)
"""Compiler options for generated texts."""


def options(dtype: DType) -> tuple[str, ...]:
    """Compiler options for kernels over elements of `dtype`."""
    return ("-std=c++17", f"-DELEMENT={_TYPES[dtype]}", f"-I{_ENGINE}", f"-I{header_directory()}")


def element_name(dtype: DType) -> str:
    """Returns what generated kernels call a dtype."""
    return _GENERATED[dtype]


def struct(values: tuple[Any, ...], fields: DType) -> np.ndarray[Any, Any]:
    """Makes a structure that a kernel takes by value, as bytes: of a type with fields CuPy lists all at each launch."""
    return np.array([values], fields).view(_bytes_of(fields))


@lru_cache(maxsize=64)
def _bytes_of(fields: DType) -> DType:
    return np.dtype((np.void, fields.itemsize))


def begin(fast: bool) -> str:
    """Returns how a generated text begins: the types and functions of dtypes.cuh, approximate ones if `fast`."""
    return f'#define FAST {int(fast)}\n#include "backend/cuda/codegen/dtypes.cuh"\n'


def included(text: str) -> str:
    """Returns `text` with our headers in place of their #include, each once.

    CuPy's cache on disk is keyed by the text, and would not notice that a header has changed.
    """
    seen: set[str] = set()

    def header(found: re.Match[str]) -> str:
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return _INCLUDE.sub(header, (_ENGINE / found[1]).read_text(encoding="utf-8")).replace("#pragma once\n", "")

    return _INCLUDE.sub(header, text)


def file_text(file: str) -> str:
    """Returns what is compiled of `file`, a path in `engine/`."""
    return included((_ENGINE / file).read_text(encoding="utf-8"))


class _Function:
    """A kernel whose launches can be watched."""

    __slots__ = ("_function", "_launch_hooks", "_name", "_shared_bytes")

    def __init__(self, function: Any, name: str, launch_hooks: LaunchHooks) -> None:
        self._function, self._name, self._launch_hooks = function, name, launch_hooks
        self._shared_bytes = _SHARED_BYTES

    def allow(self, shared_bytes: int) -> None:
        """Lets its blocks use that much dynamic shared memory."""
        if shared_bytes > self._shared_bytes:
            self._function.max_dynamic_shared_size_bytes = self._shared_bytes = shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_mem: int = 0,
        cooperative: bool = False,
    ) -> None:
        if not self._launch_hooks.should_launch(self._name, args):
            return
        if cooperative:  # RawKernel's own option for this would link CUDA's device runtime
            self._function.kernel(grid, block, args, shared_mem, enable_cooperative_groups=True)
        else:
            self._function(grid, block, args, shared_mem=shared_mem)


class KernelModules:
    """Compiled modules by (file, element type), or by their text. Several threads may ask at once."""

    def __init__(self, cupy: Any, launch_hooks: LaunchHooks) -> None:
        self._cupy, self._launch_hooks = cupy, launch_hooks
        self._modules = MadeOnce[tuple[str, DType], Any]()
        self._functions = MadeOnce[tuple[str, str, DType], _Function]()
        self._generated = MadeOnce[tuple[str, str], _Function]()
        self._lock = threading.Lock()

    @cached_property
    def _prebuilt(self) -> PrebuiltKernels:
        return PrebuiltKernels(self._cupy, f"sm_{self._cupy.cuda.Device().compute_capability}")

    def get(self, file: str, kernel: str, dtype: DType, shared_bytes: int = 0) -> _Function:
        """Returns the function `kernel` of `file`, a path in `engine/`, for elements of `dtype`.

        Its blocks may use `shared_bytes` of shared memory.
        """
        found = self._functions.of((file, kernel, dtype), lambda: self._of_file(file, kernel, dtype))
        with self._lock:
            found.allow(shared_bytes)
        return found

    def generated(self, text: str, kernel: str) -> _Function:
        """Returns the function `kernel` of a generated text, which names its element types itself."""
        return self._generated.of((text, kernel), lambda: self._of_text(text, kernel))

    def _of_file(self, file: str, kernel: str, dtype: DType) -> _Function:
        def module() -> Any:
            made = self._built(file_text(file), options(dtype))
            made.get_function(kernel)  # which compiles all of the file
            return made

        found = self._modules.of((file, dtype), module).get_function(kernel)
        return _Function(found, kernel, self._launch_hooks)

    def _of_text(self, text: str, kernel: str) -> _Function:
        module = self._built(included(text), TEXT_OPTIONS)
        return _Function(module.get_function(kernel), kernel, self._launch_hooks)

    def _built(self, code: str, flags: tuple[str, ...]) -> Any:
        """Returns the module of a text: from the package of compiled kernels, from CuPy's cache, or compiled now."""
        found = self._prebuilt.find(code, flags)
        return self._cupy.RawModule(path=str(found)) if found else self._cupy.RawModule(code=code, options=flags)


_OPTIONS = (*TEXT_OPTIONS, "-default-device", "-arch=compute_90")  # what all cards that matter have, and more


def compiler_log(text: str) -> str:
    """What NVRTC says of a text that does not compile; "" if it does, or if NVRTC or CUDA's headers are not here."""
    try:
        library, headers = load("nvrtc"), header_directory()
    except (ImportError, EnvironmentFault):
        return ""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    given = [option.encode() for option in (*_OPTIONS, f"-I{headers}")]
    library.nvrtcCreateProgram(ctypes.byref(program), included(text).encode(), b"kernel.cu", 0, None, None)
    try:
        if not library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
            return ""
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        said = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, said)
        return said.value.decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
