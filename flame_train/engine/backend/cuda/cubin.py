"""Kernels compiled for `sm_90a`, compute capability 9.0 alone, for which CuPy does not compile; kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from ....errors import DeviceFault
from ...dtype import DType
from .autotuner import AutotuneCache
from .made_once import MadeOnce, started
from .nvrtc import options
from .prebuilt import PrebuiltKernels, compiler_version

ARCHITECTURE = "sm_90a"
_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cubins:
    """Compiled modules by their text and element type."""

    def __init__(self, cupy: Any, cache: AutotuneCache) -> None:
        self._cupy, self._cache = cupy, cache
        self._functions = MadeOnce[tuple[str, DType], tuple[Any, Any]]()

    @cached_property
    def version(self) -> str:
        """The compiler's version."""
        return compiler_version(self._cupy)

    @cached_property
    def _prebuilt(self) -> PrebuiltKernels:
        return PrebuiltKernels(self._cupy, ARCHITECTURE)

    def get(self, text: str, kernel: str, dtype: DType, shared_bytes: int) -> Any:
        """Returns the function `kernel` of a text for elements of `dtype`, allowed `shared_bytes` of shared memory.

        Several threads may ask at once, also for the same function. Raises DeviceFault if it does not compile.
        """
        return self._functions.of((text, dtype), lambda: self._loaded(text, kernel, dtype, shared_bytes))[0]

    def ahead(self, wanted: Iterable[tuple[str, str, DType, int]]) -> None:
        """Starts compiling what `get` will be called for, by its arguments."""
        started(partial(self.get, *each) for each in wanted)

    def _loaded(self, text: str, kernel: str, dtype: DType, shared_bytes: int) -> tuple[Any, Any]:
        module = self._cupy.cuda.function.Module()
        module.load(self._compiled(text, dtype))
        function = module.get_function(kernel)
        self._cupy.cuda.driver.funcSetAttribute(function.ptr, _SHARED_BYTES_ATTRIBUTE, shared_bytes)
        return function, module

    def _compiled(self, text: str, dtype: DType) -> bytes:
        flags = options(dtype)
        found = self._prebuilt.find(text, flags)
        if found:
            return found.read_bytes()
        flags = (*flags, f"-arch={ARCHITECTURE}")
        question = f"cubin, NVRTC {self.version}, {flags}: {hashlib.sha256(text.encode()).hexdigest()}"
        kept = self._cache.get(question)
        if kept is None:
            kept = compiled(self._cupy.cuda.nvrtc, text, flags)
            self._cache.put(question, kept)
        return kept


def compiled(nvrtc: Any, text: str, flags: tuple[str, ...]) -> bytes:
    """Returns the cubin of a text, by CuPy's binding of NVRTC. Raises DeviceFault if it does not compile."""
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, flags)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as e:
        asked = flags[-1].removeprefix("-arch=")
        raise DeviceFault(f"a kernel does not compile for {asked} ({e}): {nvrtc.getProgramLog(program)}") from e
    finally:
        nvrtc.destroyProgram(program)
