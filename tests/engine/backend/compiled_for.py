"""Every kernel that is rehearsed, compiled for cards that the tests do not run on: does it, and do its blocks fit?

    pytest -n 2 -q tests/engine/backend/compiled_for.py

Not collected by default: it wants NVRTC and CUDA's headers, as the GPU extras bring them, but no GPU; some six minutes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sizes import MORE, STEP
from flame_train.engine.backend.cuda import nvrtc
from flame_train.engine.backend.cuda.nvidia_libraries import header_directory, load
from flame_train.engine.backend.shapes.driver import RTX_3090, T4
from tests.engine.backend.stand_in import Card, Function, Products, RawModule

_SPEC = importlib.util.spec_from_file_location("rehearsal", Path(__file__).with_name("test_rehearsal.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
T = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(T)

CARDS = {
    "T4": T4,
    "A100": Card("80", 108, 163 << 10),
    "RTX 3090": RTX_3090,
    "RTX 4090": Card("89", 128, 99 << 10),
    "B200": Card("100", 148, 227 << 10),
    "RTX 5090": Card("120", 170, 99 << 10),
}
REGISTERS = 1 << 16  # that a multiprocessor has, for as many threads as a block has
BY_CUPY = ("-ftz=true", "-default-device")  # which it adds, and the headers' folder


@pytest.fixture
def launched(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, tuple[str, ...], str, int]]:
    """Text, options, name and threads of a block of each kernel that was launched."""
    noted = set[tuple[str, tuple[str, ...], str, int]]()
    call = Function.__call__

    def noting(self: Function, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        module: RawModule = self.module
        noted.add((module.code, module.options, self.name, int(np.prod(block))))
        call(self, grid, block, args, shared_mem)

    monkeypatch.setattr(nvrtc, "header_directory", header_directory)
    monkeypatch.setattr(Function, "__call__", noting)
    return noted


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("card", "dtype"),
    [pytest.param(c, d, id=f"{name}-{d.name}") for name, c in CARDS.items() for d in T.dtypes_of(c)],
)
@pytest.mark.parametrize("name", T.OPS)
def test_kernels_compile_and_their_blocks_fit(gpu: Any, card: Card, name: str, dtype: Any, launched: Any) -> None:
    T.test_launches_fit_their_kernels_and_the_card(gpu, name, dtype)
    check(card, launched)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize(
    "name", sorted(n for n in {*STEP, *MORE} if T.REGISTRY[n].kernels or T.REGISTRY[n].kernel_formulas)
)
def test_so_they_do_at_the_sizes_of_sdxl_and_flux(
    gpu: Any, card: Card, name: str, launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Products, "product", lambda *_, **__: None)  # NumPy would take minutes for these
    op = T.REGISTRY[name]
    for i, s in enumerate([*STEP.get(name, []), *MORE.get(name, [])]):
        host = T.materialise(op, s, T.generator(name, i), T.dtypes_of(card)[1])
        T.run(op, T.moved(op, host, "cuda"), {*op.differentiable})
    check(card, launched)


def check(card: Card, launched: set[tuple[str, tuple[str, ...], str, int]]) -> None:
    for text, options, kernel, threads in launched:
        registers = compiled(text, options, card.capability)[kernel]
        assert -(-registers // 8) * 8 * threads <= REGISTERS, f"{kernel}: {registers} registers, {threads} threads"


@cache
def compiled(text: str, options: tuple[str, ...], capability: str) -> dict[str, int]:
    """The registers a thread of each kernel takes."""
    library, program = load("nvrtc"), ctypes.c_void_p()
    given = [*options, *BY_CUPY, f"-I{header_directory()}", f"-arch=sm_{capability}", "--ptxas-options=-v"]
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*map(str.encode, given)))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    said = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, said)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    log = said.value.decode()
    assert not failed, log
    found = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    return {kernel: int(registers) for kernel, registers in found}
