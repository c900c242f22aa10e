"""Our own kernels, compiled on first use and cached on disk by CuPy: ops/*.cu by element type, and generated text."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from ...dtype import DType, bfloat16, bool_, float16, float32
from .libraries import header_directory

_OPS = Path(__file__).parents[2] / "ops"
_TYPES = {float32: "float", float16: "__half", bfloat16: "__nv_bfloat16"}
ELEMENT_TYPES = frozenset(_TYPES)
_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_GENERATED = {float32: "float", float16: "fp16", bfloat16: "bf16", bool_: "bool"}


def options(dtype: DType) -> tuple[str, ...]:
    """Compiler options for kernels over elements of `dtype`."""
    return ("-std=c++17", f"-DELEMENT={_TYPES[dtype]}", f"-I{_OPS}", f"-I{header_directory()}")


def element_name(dtype: DType) -> str:
    """What generated kernels call a dtype."""
    return _GENERATED[dtype]


def included(text: str) -> str:
    """`text` with our headers in place of their #include, each once: CuPy's cache on disk knows the text alone."""
    seen: set[str] = set()

    def header(found: re.Match[str]) -> str:
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return _INCLUDE.sub(header, (_OPS / found[1]).read_text(encoding="utf-8")).replace("#pragma once\n", "")

    return _INCLUDE.sub(header, text)


class KernelModules:
    """Compiled modules by (file, element type), or by their text."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._modules: dict[tuple[str, DType], Any] = {}
        self._generated: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, file: str, kernel: str, dtype: DType) -> Any:
        """The function `kernel` of ops/`file` for elements of `dtype`."""
        key = (file, dtype)
        with self._lock:
            if key not in self._modules:
                code = included((_OPS / file).read_text(encoding="utf-8"))
                self._modules[key] = self._cupy.RawModule(code=code, options=options(dtype))
            return self._modules[key].get_function(kernel)

    def generated(self, text: str, kernel: str) -> Any:
        """The function `kernel` of a generated text, which names its element types itself."""
        with self._lock:
            if text not in self._generated:
                module = self._cupy.RawModule(code=included(text), options=("-std=c++17",))
                self._generated[text] = module.get_function(kernel)
            return self._generated[text]
