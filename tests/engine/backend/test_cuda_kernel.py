"""Kernels in CUDA C as functions over tensors: run as C++, their parameters checked, errors with lines."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.backend.cuda import nvrtc as declared
from flame_train.errors import EnvironmentFault, ShapeError

SOURCE = """
// y = by * x
__global__ void scale(const float* __restrict__ x, float* y, const float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = by * x[i];
}
"""


def compiler_is_here() -> bool:
    try:
        declared.load("nvrtc")
        return bool(declared.header_directory())
    except (ImportError, EnvironmentFault):
        return False


class Failed(Exception):
    """What CuPy raises."""


Failed.__name__ = "CompileException"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_computes(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    scale = flame.cuda_kernel(SOURCE, "scale")
    x = flame.tensor(np.arange(70, dtype=np.float32), device="cuda")
    y = flame.tensor(np.zeros(70, np.float32), device="cuda")
    scale(3, 32, x, y, 2.5, 70)
    compiled.build()
    scale((3,), (32,), x, y, 2.5, 70)
    np.testing.assert_array_equal(y.numpy(), 2.5 * np.arange(70, dtype=np.float32))
    assert len(compiled.texts) == 1


def test_what_is_written_is_noticed_by_the_graph(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", lambda text, name: lambda *args: None)
    x, y = (flame.tensor(np.ones(3, np.float32), device="cuda") for _ in range(2))
    loss = (flame.tensor(np.ones(3, np.float32), device="cuda", requires_grad=True) * y).sum()
    flame.cuda_kernel(SOURCE, "scale")(1, 32, x, y, 1.0, 3)
    with pytest.raises(RuntimeError, match="written in place since"):
        loss.backward()


def test_the_compilers_message_has_the_line(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str, name: str) -> None:
        assert '#line 1 "scale.cu"' in text
        raise Failed('scale.cu(5): error: identifier "by" is undefined\n1 error detected')

    monkeypatch.setattr(gpu.kernels._modules, "generated", fails)
    x = flame.tensor(np.ones(3, np.float32), device="cuda")
    with pytest.raises(SyntaxError, match=r'line 5: error: identifier "by" is undefined\n    if \(i < n\) y\[i\] = by'):
        flame.cuda_kernel(SOURCE, "scale")(1, 32, x, x, 1.0, 3)


X = flame.tensor(np.ones(4, np.float32))
SCALE = flame.cuda_kernel(SOURCE, "scale")


@pytest.mark.parametrize(
    ("mistake", "error", "match"),
    [
        (lambda: SCALE(1, 32, X, X, 1.0), TypeError, r"expected 4 arguments \(x, y, by, n\), got 3"),
        (lambda: SCALE(1, 32, X.to("float64"), X, 1.0, 4), TypeError, "expected float32 for 'x', got float64"),
        (lambda: SCALE(1, 32, 3, X, 1.0, 4), TypeError, "expected a Tensor for 'x', got int"),
        (lambda: SCALE(1, 32, X, X, "1", 4), TypeError, "expected a number for 'by', got str"),
        (lambda: SCALE(1, 32, X, X, 1.0, 4), RuntimeError, "expected tensors on one GPU, got cpu"),
        (lambda: SCALE(1, 32, X.reshape(2, 2).T, X, 1.0, 4), ShapeError, "'x' contiguous in memory"),
        (lambda: SCALE(1, 32, X, X.clone().requires_grad_(), 1.0, 4), RuntimeError, "'y' is written and requires grad"),
        (lambda: flame.cuda_kernel(SOURCE, "other"), ValueError, "no __global__ function 'other'"),
        (lambda: flame.cuda_kernel("__global__ void f(char** x) {}", "f"), ValueError, "parameter 'char"),
        (lambda: flame.cuda_kernel(3, "f"), TypeError, "expected CUDA C as text, got int"),
    ],
)
def test_mistakes_are_told(mistake: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mistake()


def test_sizes_that_are_none(gpu: Any) -> None:
    x = flame.tensor(np.ones(4, np.float32), device="cuda")
    for grid, block in ((0, 32), (1, (1, 2, 3, 4)), (1.5, 32)):
        with pytest.raises((ShapeError, TypeError)):
            SCALE(grid, block, x, x, 1.0, 4)


def test_examples_hold() -> None:
    assert doctest.testmod(importlib.import_module("flame_train.engine.cuda_kernel")).failed == 0


class Nvrtc:
    """NVRTC's functions in C: a text with the word `oops` does not compile."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.alive = 0
        self.log = b""
        self.nvrtcCreateProgram, self.nvrtcCompileProgram = self.create, self.build
        self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog = self.size, self.said
        self.nvrtcDestroyProgram = self.destroy

    def create(self, program: Any, text: bytes, *rest: Any) -> int:
        self.alive += 1
        self.texts.append(text.decode())
        lines = text.decode().split('#line 1 "scale.cu"')[1].split("\n")[1:]
        told = [b'scale.cu(%d): error: "oops" is undefined\n' % (i + 1) for i, x in enumerate(lines) if "oops" in x]
        self.log = b"".join(told)
        return 0

    def build(self, program: Any, count: int, options: Any) -> int:
        assert b"-I/headers" in list(options)
        return 6 if self.log else 0

    def size(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.log) + 1
        return 0

    def said(self, program: Any, said: Any) -> int:
        said.value = self.log
        return 0

    def destroy(self, program: Any) -> int:
        self.alive -= 1
        return 0


def test_a_mistake_is_told_at_the_declaration_where_the_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Nvrtc()
    monkeypatch.setattr(declared, "load", lambda name: compiler)
    monkeypatch.setattr(declared, "header_directory", lambda: "/headers")
    flame.cuda_kernel(SOURCE, "scale")
    with pytest.raises(SyntaxError, match=r'line 5: error: "oops" is undefined\n    if \(i < n\) y\[i\] = oops'):
        flame.cuda_kernel(SOURCE.replace("by * x", "oops * x").replace("// y = oops * x", "// y = by * x"), "scale")
    assert compiler.alive == 0
    assert all("#include" not in text for text in compiler.texts)


def test_without_a_compiler_a_text_is_declared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise EnvironmentFault(name)

    monkeypatch.setattr(declared, "load", missing)
    flame.cuda_kernel(SOURCE.replace("by * x[i]", "oops"), "scale")


@pytest.mark.skipif(not compiler_is_here(), reason="NVRTC and CUDA's headers are not installed")
def test_nvrtc_itself_names_the_line() -> None:
    flame.cuda_kernel(SOURCE, "scale")
    with pytest.raises(SyntaxError, match=r'line 5: error: identifier "oops" is undefined\n    if \(i < n\)'):
        flame.cuda_kernel(SOURCE.replace("= by * x[i]", "= oops * x[i]"), "scale")
