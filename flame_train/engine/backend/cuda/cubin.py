"""Kernels compiled for `sm_90a`, compute capability 9.0 alone, for which CuPy does not compile; kept on disk."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from ....errors import DeviceFault
from ...dtype import DType
from .autotune_cache import AutotuneCache
from .nvrtc import options

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cubins:
    """Compiled modules by their text and element type."""

    def __init__(self, cupy: Any, cache: AutotuneCache) -> None:
        self._cupy, self._cache = cupy, cache
        self._functions: dict[tuple[str, DType], Future[tuple[Any, Any]]] = {}
        self._lock = threading.Lock()

    @cached_property
    def version(self) -> str:
        """The compiler's version."""
        return ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))

    def get(self, text: str, kernel: str, dtype: DType, shared_bytes: int) -> Any:
        """The function `kernel` of a text for elements of `dtype`, allowed `shared_bytes` of shared memory.

        Several threads may ask at once, also for the same function. Raises DeviceFault if it does not compile.
        """
        found, first = self._awaited(text, dtype)
        if first:
            try:
                found.set_result(self._loaded(text, kernel, dtype, shared_bytes))
            except BaseException as e:
                with self._lock:
                    del self._functions[text, dtype]
                found.set_exception(e)
        return found.result()[0]

    def ahead(self, wanted: Iterable[tuple[str, str, DType, int]]) -> None:
        """Starts compiling what `get` will be called for, by its arguments, on as many threads as there are cores."""
        pool = ThreadPoolExecutor(os.cpu_count())
        for each in wanted:
            pool.submit(self.get, *each)
        pool.shutdown(wait=False)

    def _awaited(self, text: str, dtype: DType) -> tuple[Future[tuple[Any, Any]], bool]:
        """The future of a function, and whether this call is the first to ask, and so has to make it."""
        with self._lock:
            first = (text, dtype) not in self._functions
            return self._functions.setdefault((text, dtype), Future()), first

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
