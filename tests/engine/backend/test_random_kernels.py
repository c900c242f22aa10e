"""The kernels that draw random numbers, without a GPU: compiled as C++, the same bits as NumPy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.nvrtc import included
from flame_train.engine.random import _source, bits, normal_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MACHINE = """
#include <cmath>
#define __device__
#define __forceinline__ inline
#define __global__
#define __constant__ static const
struct Place { unsigned x; };
static Place threadIdx, blockIdx, blockDim = {1};
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dsqrt_rn(double a) { return sqrt(a); }
extern "C" void place(unsigned block) { blockIdx.x = block; }
"""

Run = Callable[[str, int, list[Any]], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a kernel of one thread a block."""
    folder = tmp_path_factory.mktemp("random")
    source, found = folder / "random.cpp", folder / "random.so"
    source.write_text(MACHINE + included(_source()))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", found, source], check=True)
    library = ctypes.CDLL(str(found))

    def call(kernel: str, blocks: int, args: list[Any]) -> None:
        values = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int64(a) for a in args]
        for i in range(blocks):
            library.place(ctypes.c_uint(i))
            getattr(library, kernel)(*values)

    return call


@pytest.mark.parametrize("step", [5, 2**32 - 1])
@pytest.mark.parametrize("seed", [42, 2**63 + 5, -3])
def test_words(run: Run, seed: int, step: int) -> None:
    samples, blocks = np.array([0, 5, 2**31 + 1, 2**32 - 1], np.int64), np.arange(9, dtype=np.int64)
    signed = int(np.array(seed % 2**64, np.uint64).astype(np.int64))
    for place, on_host in ((0, step), (np.array(step, np.int64), 0)):
        words = np.empty((4, 36), np.uint32)
        run("philox_words", 36, [words, samples, blocks, place, on_host, 9, signed, 9, 36])
        np.testing.assert_array_equal(words, bits(np, seed, 9, step, samples, 36))


def test_normals_of_all_regions(run: Run) -> None:
    rng = np.random.default_rng(0)
    edges = [np.arange(3000), 2**32 - 1 - np.arange(3000), 2**31 + np.arange(-50, 50), rng.integers(0, 2**32, 20_000)]
    words = np.concatenate(edges).astype(np.uint32)
    z = np.empty(words.shape, np.float32)
    run("normals", words.size, [words, z, words.size])
    assert z.tobytes() == normal_of(np, words).tobytes()
