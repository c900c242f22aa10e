"""The kernels that draw random numbers, without a GPU: compiled as C++, the same bits as NumPy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.nvrtc import included
from flame_train.engine.random import Rng, _source, bits, normal_of

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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("random")
    source, found = folder / "random.cpp", folder / "random.so"
    source.write_text(MACHINE + included(_source()))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", found, source], check=True)
    return ctypes.CDLL(str(found))


@pytest.fixture
def xp(gpu: Any, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's arrays, with the kernels run for them: a thread after another, each a block of its own."""

    def generated(text: str, kernel: str) -> Any:
        assert text == _source()

        def call(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            values = [ctypes.c_void_p(a.data.ptr) if isinstance(a, np.ndarray) else ctypes.c_int64(a) for a in args]
            for i in range(grid[0] * block[0]):
                library.place(ctypes.c_uint(i))
                getattr(library, kernel)(*values)

        return call

    monkeypatch.setattr(gpu.kernels._modules, "generated", generated)
    return gpu.xp


@pytest.mark.parametrize("seed", [42, 2**63 + 5, -3])
@pytest.mark.parametrize("count", [0, 1, 36, 1030])
def test_words(xp: Any, seed: int, count: int) -> None:
    samples = np.array([0, 5, 2**31 + 1, 2**32 - 1], np.int64)
    for step in (0, 2**32 - 1, np.asarray(5, np.int32)):
        wanted = bits(np, seed, 9, step, samples, count)
        for place in (step, np.asarray(step), xp.asarray(step)):  # a number, on the host, on the device
            np.testing.assert_array_equal(bits(xp, seed, 9, place, xp.asarray(samples), count), wanted)


def test_draws(xp: Any) -> None:
    here, there = Rng(np, 7, 2, np.arange(3)), Rng(xp, 7, xp.asarray(2), xp.arange(3))
    for shape in ((), (5,), (8, 8, 4)):
        np.testing.assert_array_equal(there.normal(20, shape), here.normal(20, shape))
        np.testing.assert_array_equal(there.uniform(20, shape), here.uniform(20, shape))


def test_normals_of_all_regions(xp: Any) -> None:
    rng = np.random.default_rng(0)
    edges = [np.arange(3000), 2**32 - 1 - np.arange(3000), 2**31 + np.arange(-50, 50), rng.integers(0, 2**32, 20_000)]
    words = np.concatenate(edges).astype(np.uint32)
    assert np.asarray(normal_of(xp, xp.asarray(words))).tobytes() == normal_of(np, words).tobytes()
