"""Kernels compiled as C++, their values included, for tests that have no GPU: see backend/machine.cpp for how."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda import nvrtc

BEGIN = re.compile(r'#define FAST ([01])\n#include "elements.cuh"\n')

MACHINE = (Path(__file__).parent / "backend" / "machine.cpp").read_text()
OPS_FOLDER = Path(nvrtc.__file__).parents[2] / "ops"
SHARED = "float* const shared = dynamic[here()]"
NARROW = """
struct __half {}; struct __nv_bfloat16 {};
static float __half2float(__half), __bfloat162float(__nv_bfloat16);
static __half __float2half_rn(float); static __nv_bfloat16 __float2bfloat16_rn(float);
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
"""


class Kernels:
    """Kernels by their text: collected in a first run, in which they do nothing, then compiled together."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.texts, self.library = folder, {}, None

    def generated(self, text: str, kernel: str) -> Any:
        at = self.texts.setdefault((text, kernel), len(self.texts))

        def call(
            grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], resident: bool = False
        ) -> None:  # fmt: skip
            if self.library is None:
                return
            values = [np.array([a.data.ptr], np.uint64) if isinstance(a, np.ndarray) else np.array([a]) for a in args]
            pointers = (ctypes.c_void_p * len(args))(*(v.ctypes.data for v in values))
            whole = (ctypes.c_int * 3)(*(int(n) for n in (*grid, 1, 1)[:3]))
            getattr(self.library, f"run{at}")(whole, block[0], pointers, resident)

        return call

    def get(self, file: str, kernel: str, dtype: Any, shared_bytes: int = 0) -> Any:
        """A kernel of a file, over fp32: what it has of CUDA's headers and of shared memory is as C++ has it."""
        text = nvrtc.included((OPS_FOLDER / file).read_text()).replace("typedef ELEMENT T;", "typedef float T;")
        text = re.sub(r"#include <cuda_\w+\.h>\n", "", text).replace("extern __shared__ float shared[]", SHARED)
        run = self.generated(f'#define FAST 0\n#include "elements.cuh"\n{NARROW}{text}', kernel)
        return lambda grid, block, args, shared_mem, resident: run(grid, block, args, resident)

    def build(self) -> None:
        source, found = self.folder / "kernels.cpp", self.folder / "kernels.so"
        units = [self._unit(n, *key) for key, n in self.texts.items()]
        source.write_text("".join([MACHINE, self._header(0), self._header(1), *units]))
        subprocess.run(["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-o", found, source], check=True)
        self.library = ctypes.CDLL(str(found))

    def _header(self, fast: int) -> str:
        """What every text begins with, read once for all that have the same `FAST`."""
        cuda = (OPS_FOLDER / "convert.cuh").read_text().replace("#pragma once\n", "")
        code = nvrtc.included('#include "elements.cuh"').replace(cuda, "")
        ours = "using ::to_float; using ::from_float; using ::from_two;"  # which MACHINE has for all
        return f"namespace fast{fast} {{\n{ours}\n#define FAST {fast}\n{code}\n#undef FAST\n}}\n"

    def _unit(self, n: int, text: str, kernel: str) -> str:
        begin = BEGIN.match(text)
        assert begin is not None
        code = nvrtc.included(text[begin.end() :]).replace('extern "C" ', "")
        for name in ("counted", "copy_async"):  # which MACHINE has instead
            code = code.replace(nvrtc.included(f'#include "{name}.cuh"'), "")
        assert "asm" not in code
        found = re.search(rf"\b{kernel}\(([^)]*)\) {{", code[code.index("__global__ void") :])
        assert found is not None
        types = [re.sub(r"\b(const|__restrict__)\b|\w+$", "", p.strip()).strip() for p in found[1].split(",")]
        arguments = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(types))
        together = "true" if "of_all<" in code or "__syncthreads" in code else "false"
        return f"""
namespace unit{n} {{
using namespace fast{begin[1]};
{code}
extern "C" void run{n}(const int* grid, int threads, void** a, int resident) {{
  launch(grid, threads, [](void** a) {{ {kernel}({arguments}); }}, a, {together}, resident);
}}
}}
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Kernels:
    """To stand for the module loader of the CUDA backend over the stand-in."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Kernels(tmp_path)
