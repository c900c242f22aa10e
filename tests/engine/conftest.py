"""Kernels compiled as C++, their values included, for tests that have no GPU.

See backend/machine.cpp for how, and backend/ptx.cpp for what stands in assembly.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.engine import lazy
from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.backend.cuda import nvrtc

lazy.load_ops()  # a test of every op lists the registry

BEGIN = re.compile(r'#define FAST ([01])\n#include "backend/cuda/codegen/dtypes.cuh"\n')

MACHINE = "".join((Path(__file__).parent / "backend" / f"{name}.cpp").read_text() for name in ("machine", "ptx"))
ENGINE_FOLDER = Path(nvrtc.__file__).parents[2]
BEFORE_SHARED = 1040  # bytes of the barriers that come first; what follows is no better aligned than on a card
DYNAMIC = rf"\1* const \2 = (\1*)((unsigned char*)dynamic[here()] + {BEFORE_SHARED})"
HALVES = """
struct __half { unsigned short bits; };
struct __half2 { __half x, y; };
struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float __half2float(__half h) { return of_f16(h.bits); }
static float __bfloat162float(__nv_bfloat16 b) { return of_bf16(b.bits); }
static __half __float2half_rn(float f) { _Float16 h = f; __half y; memcpy(&y, &h, 2); return y; }
static __nv_bfloat16 __float2bfloat16_rn(float f) { bf16 b; from_float(f, b); return {b.bits}; }
static __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
"""


def shape_of(grid: tuple[int, ...], cluster: tuple[int, ...], threads: int, shared_bytes: int) -> Any:
    """What machine.cpp's launch is told of sizes."""
    whole, together = [*grid, 1, 1][:3], [*cluster, 1][:2]
    return (ctypes.c_int * 7)(*map(int, (*whole, *together, threads, shared_bytes)))


def pointers_to(args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Arguments as an `entry` takes them, and what holds them: arrays by address, structs and numbers by value."""
    values = [
        a
        if isinstance(a, np.ndarray) and (a.dtype.fields or a.dtype.type is np.void)
        else np.array([a.data.ptr], np.uint64)
        if isinstance(a, np.ndarray)
        else np.array([a])
        for a in args
    ]
    return (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values)), values


def entry(name: str, kernel: str, code: str, together: str) -> str:
    """A C function `name` that launches `kernel` of `code`, which may be a macro's NAME."""
    text = code[code.index("__global__ void") :].replace("\\\n", "")
    found = re.search(rf"\b{kernel}\(([^)]*)\) {{", text) or re.search(r"\bNAME\(([^)]*)\) {", text)
    assert found is not None
    no_type = r"\b(const|__restrict__|__grid_constant__)\b|\w+$"
    types = [re.sub(no_type, "", p.strip()).strip() for p in found[1].split(",")]
    arguments = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(types))
    return f"""
extern "C" const char* {name}(const int* shape, void** a) {{
  return launch(shape, [](void** a) {{ {kernel}({arguments}); }}, a, {together});
}}
"""


def options() -> list[str]:
    """The compiler's, `-Og` because it leaves out what nothing calls. KERNEL_FLAGS: scripts/sanitize_kernels.sh."""
    return ["-std=c++17", "-Og", "-w", "-Wno-psabi", "-fPIC", *os.environ.get("KERNEL_FLAGS", "").split()]


@cache
def machine() -> Path:
    """The machine as a header, read once by the compiler for all kernels of a test worker."""
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    atexit.register(shutil.rmtree, folder)
    header = folder / "machine.h"
    header.write_text(MACHINE)
    subprocess.run(["g++", *options(), "-x", "c++-header", "-o", f"{header}.gch", header], check=True)
    return header


def compiled_library(source: Path, text: str) -> Any:
    """Kernels on the machine, as a library."""
    source.write_text(text)
    found = source.with_suffix(".so")
    subprocess.run(["g++", *options(), "-shared", "-include", machine(), "-o", found, source], check=True)
    return ctypes.CDLL(str(found))


def run(library: Any, name: str, shape: Any, args: tuple[Any, ...]) -> None:
    """Launches by an `entry`; what is wrong with the launch fails the test."""
    pointers, _held = pointers_to(args)
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    wrong = function(shape, pointers)
    assert wrong is None, wrong.decode()


class Kernels:
    """Kernels by their text: collected in a first run, in which they do nothing, then compiled together.

    One that only a later run asks for, because arrays lie otherwise in memory there, is compiled by itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.texts, self.library = folder, {}, None
        self.late: dict[int, Any] = {}

    def generated(self, text: str, kernel: str) -> Any:
        new = (text, kernel) not in self.texts
        at = self.texts.setdefault((text, kernel), len(self.texts))
        if new and self.library is not None:
            self.late[at] = self._compiled(f"late{at}.cpp", [self._unit(at, text, kernel)])

        def call(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            if self.library is not None:
                run(self.late.get(at, self.library), f"run{at}", shape_of(grid, (1,), block[0], 1 << 18), args)

        return call

    def build(self) -> None:
        self.library = self._compiled("kernels.cpp", [self._unit(n, *key) for key, n in self.texts.items()])

    def _compiled(self, name: str, units: list[str]) -> Any:
        return compiled_library(self.folder / name, "".join([self._header(0), self._header(1), *units]))

    def _header(self, fast: int) -> str:
        """What every text begins with, read once for all that have the same `FAST`."""
        cuda = (ENGINE_FOLDER / "backend/cuda/codegen/convert.cuh").read_text().replace("#pragma once\n", "")
        code = nvrtc.included('#include "backend/cuda/codegen/dtypes.cuh"').replace(cuda, "")
        ours = "using ::to_float; using ::from_float; using ::from_two;"  # which MACHINE has for all
        return f"namespace fast{fast} {{\n{ours}\n#define FAST {fast}\n{code}\n#undef FAST\n}}\n"

    def _unit(self, n: int, text: str, kernel: str) -> str:
        begin = BEGIN.match(text)
        assert begin is not None
        code = without_assembly(nvrtc.included(text[begin.end() :]).replace('extern "C" ', ""))
        together = "true" if re.search("of_all<|__syncthreads|__shfl_", code) else "false"
        return f"""
namespace unit{n} {{
using namespace fast{begin[1]};
{code}
{entry(f"run{n}", kernel, code, together)}
}}
"""


def balanced(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes, those in string literals left out."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[at:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return at + token.end()
    raise AssertionError(text[at : at + 80])


def statements(code: str) -> Iterator[tuple[int, int, str, list[str]]]:
    """The assembly of CUDA C++: where each statement begins and ends, its instructions and its operands."""
    for found in re.finditer(r"\basm\b(?: volatile)?\s*(?=\()", code):
        end = balanced(code, found.end())
        inside = code[found.end() + 1 : end - 1]
        literals = re.match(r'(?:\s*"(?:[^"\\]|\\.)*")*', inside)
        assert literals is not None
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals[0])).replace("\\n", "\n")
        operands = [inside[o.end() : balanced(inside, o.end())] for o in re.finditer(r'"[=+]?[a-z]"(?=\()', inside)]
        yield found.start(), end, text, operands


def without_assembly(code: str) -> str:
    """The code with a call of ptx.cpp's for each statement, named by its instructions, with operands in order."""
    made, last = [], 0
    for begin, end, text, operands in statements(code):
        names, given, columns = [], [], ""
        for line in re.split(r"[;\n]", text):
            words = re.sub(r"^\s*(?:@\w+ |\w+:)?\s*", "", line.strip("{} ")).split(maxsplit=1)
            if not words or words[0] in ("bra", ".reg"):
                continue
            name = re.sub(r"(?<=m64)n(\d+)(?=k\d)", "", words[0])
            if wide := re.search(r"m64n(\d+)k\d", words[0]):
                columns = f"<{wide[1]}>"
            names.append(re.sub(r"\W+", "_", name))
            rest = words[1] if len(words) > 1 else ""
            given += [operands[int(o[1:])] if o[0] == "%" else o for o in re.findall(r"%\d+|(?<![\w.])\d+\b", rest)]
        call = f"{'_and_'.join(names)}{columns}({', '.join(given)})" if names else ""
        made += [code[last:begin], call]
        last = end
    return "".join([*made, code[last:]])


class WrittenOut:
    """To stand for what loads kernels that are written out, not generated: compiled when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries = folder, dict[tuple[str, str], Any]()

    def get(self, text: str, kernel: str, dtype: Any, shared_bytes: int) -> Any:
        """As `Cubins.get`."""
        cluster = self._cluster(text)
        library = self._library(text, kernel, dtype.name)

        def call(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            shared_mem: int,
            cooperative: bool = False,
        ) -> None:
            together = grid if cooperative else cluster
            run(library, "run", shape_of(grid, together, block[0], BEFORE_SHARED + shared_mem), args)

        return call

    def of_file(self, file: str, kernel: str, dtype: Any, shared_bytes: int) -> Any:
        """As `KernelModules.get`."""
        return self.get(nvrtc.included((ENGINE_FOLDER / file).read_text()), kernel, dtype, shared_bytes)

    @staticmethod
    def _cluster(text: str) -> tuple[int, ...]:
        dims = re.search(r"__cluster_dims__\(([^)]*)\)", text)
        numbers = dict(re.findall(r"#define (\w+) (\d+)", text))
        return tuple(int(numbers.get(n, n)) for n in dims[1].split(", ")) if dims else (1, 1)

    def _library(self, text: str, kernel: str, dtype: str) -> Any:
        key = text + kernel, dtype
        if key not in self.libraries:
            element = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}[dtype]
            code = re.sub(r'#include <cuda_\w+\.h>\n|extern "C" |#pragma once\n', "", text)
            code = without_assembly(code.replace("typedef ELEMENT T;", f"typedef {element} T;"))
            code = re.sub(r"extern __shared__ ([\w ]+) (\w+)\[\]", DYNAMIC, code)
            code = re.sub(r"__shared__ u64 barriers\[[^\]]*\]", "u64* const barriers = (u64*)dynamic[here()]", code)
            source = f"namespace unit {{{HALVES}{code}\n{entry('run', kernel, code, 'true')}}}"
            self.libraries[key] = compiled_library(self.folder / f"kernel{len(self.libraries)}.cpp", source)
        return self.libraries[key]


def describe(to: int, kind: int, rank: int, at: int, sizes: Any, strides: Any, box: Any, *rest: int) -> int:
    """As cuTensorMapEncodeTiled, for ptx.cpp."""
    narrow = kind == 0  # bytes: described as pairs of them
    described = (ctypes.c_uint64 * 13)(at, rank | narrow << 16 | rest[2] << 32)
    for first, given in ((2, sizes), (6, strides), (9, box)):
        described[first : first + len(given)] = list(given)
    for first in (2, 9):
        described[first] >>= narrow
    ctypes.memmove(to, described, ctypes.sizeof(described))
    return 0


def some_and_proof(stride: int) -> pytest.MarkDecorator:
    """Takes each `stride`-th case, coprime to how many choices there are; all of them where proofs are asked for."""
    given = [stride, pytest.param(1, marks=pytest.mark.proof)]
    return pytest.mark.parametrize("every", given, ids=["some", "all"])


@pytest.fixture(scope="session")
def compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")


@pytest.fixture
def compiled(compiler: None, tmp_path: Path) -> Kernels:
    """To stand for what loads generated kernels of the CUDA backend over the stand-in."""
    return Kernels(tmp_path)


@pytest.fixture(scope="session")
def written_out(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> WrittenOut:
    """Kernels that are compiled once for all tests."""
    return WrittenOut(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def computing(gpu: Any, written_out: WrittenOut, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The CUDA backend over the stand-in, where kernels that are written out compute."""
    gpu.kernels._cubins = written_out
    monkeypatch.setattr(gpu.kernels._modules, "get", written_out.of_file)
    monkeypatch.setattr(tensor_map, "_encode", lambda: describe)
    tensor_map._encoded.cache_clear()
    yield gpu
    tensor_map._encoded.cache_clear()
