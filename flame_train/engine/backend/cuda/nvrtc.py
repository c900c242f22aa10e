"""Our own kernels: one module for each .cu file and element type, compiled on first use and cached on disk by CuPy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ...dtype import DType, bfloat16, float16, float32
from .libraries import header_directory

_OPS = Path(__file__).parents[2] / "ops"
_TYPES = {float32: "float", float16: "__half", bfloat16: "__nv_bfloat16"}
ELEMENT_TYPES = frozenset(_TYPES)


def options(dtype: DType) -> tuple[str, ...]:
    """Compiler options for kernels over elements of `dtype`."""
    return ("-std=c++17", f"-DELEMENT={_TYPES[dtype]}", f"-I{_OPS}", f"-I{header_directory()}")


class KernelModules:
    """Compiled modules by (file, element type)."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._modules: dict[tuple[str, DType], Any] = {}
        self._lock = threading.Lock()

    def get(self, file: str, kernel: str, dtype: DType) -> Any:
        """The function `kernel` of ops/`file` for elements of `dtype`."""
        key = (file, dtype)
        with self._lock:
            if key not in self._modules:
                code = (_OPS / file).read_text()
                self._modules[key] = self._cupy.RawModule(code=code, options=options(dtype))
            return self._modules[key].get_function(kernel)
