"""Kernels compiled for `sm_90a`, compute capability 9.0 alone, for which CuPy does not compile; kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from ....errors import DeviceFault
from ...dtype import DType
from .autotune_cache import AutotuneCache
from .made_once import MadeOnce, started
from .nvrtc import options

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cubins:
    """Compiled modules by their text and element type."""

    def __init__(self, cupy: Any, cache: AutotuneCache) -> None:
        self._cupy, self._cache = cupy, cache
        self._functions = MadeOnce[tuple[str, DType], tuple[Any, Any]]()

    @cached_property
    def version(self) -> str:
        """The compiler's version."""
        return ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))

    def get(self, text: str, kernel: str, dtype: DType, shared_bytes: int) -> Any:
        """The function `kernel` of a text for elements of `dtype`, allowed `shared_bytes` of shared memory.

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
        flags = (*options(dtype), "-arch=sm_90a")
        question = f"cubin, NVRTC {self.version}, {flags}: {hashlib.sha256(text.encode()).hexdigest()}"
        kept = self._cache.get(question)
        if kept is None:
            kept = self._compile(text, flags)
            self._cache.put(question, kept)
        return kept

    def _compile(self, text: str, flags: tuple[str, ...]) -> bytes:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(text, "kernel.cu", (), ())
        try:
            nvrtc.compileProgram(program, flags)
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as e:
            raise DeviceFault(f"a kernel does not compile for sm_90a ({e}): {nvrtc.getProgramLog(program)}") from e
        finally:
            nvrtc.destroyProgram(program)
