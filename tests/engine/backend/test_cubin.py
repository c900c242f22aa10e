"""Kernels compiled for this very processor, and matrices described to it: what is asked, and what is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.backend.cuda.autotuner import AutotuneCache
from flame_train.engine.backend.cuda.cubin import Cubins
from flame_train.engine.dtype import bfloat16, float16
from flame_train.errors import DeviceFault


class RefusedError(Exception):
    """NVRTC's."""


class Compiler:
    """NVRTC and the driver: a text's binary is itself reversed; a text with a mistake is refused."""

    def __init__(self) -> None:
        self.compiled, self.loaded, self.destroyed = list[tuple[str, ...]](), list[bytes](), 0
        self.allowed: dict[int, int] = {}

    def cupy(self) -> Any:
        nvrtc = SimpleNamespace(
            getVersion=lambda: (13, 0),
            createProgram=lambda text, *_: text,
            compileProgram=self.compile,
            getProgramLog=lambda _: "line 1: a mistake",
            getCUBIN=lambda text: text[::-1].encode(),
            destroyProgram=self.destroy,
            NVRTCError=RefusedError,
        )
        driver, function = SimpleNamespace(funcSetAttribute=self.allow), SimpleNamespace(Module=self.module)
        return SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc, driver=driver, function=function))

    def module(self) -> Any:
        return SimpleNamespace(load=self.loaded.append, get_function=lambda name: SimpleNamespace(ptr=len(name)))

    def allow(self, function: int, which: int, value: int) -> None:
        assert which == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.allowed[function] = value

    def compile(self, program: str, asked: tuple[str, ...]) -> None:
        if "mistake" in program:
            raise RefusedError("status 6")
        self.compiled.append(asked)

    def destroy(self, program: str) -> None:
        self.destroyed += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr("flame_train.engine.backend.cuda.nvrtc.header_directory", lambda: "/headers")
    return Compiler()


def test_a_text_is_compiled_once_for_a_processor_and_kept(compiler: Compiler, tmp_path: Path) -> None:
    first = Cubins(compiler.cupy(), AutotuneCache(tmp_path, "this card"))
    assert first.get("text", "run", bfloat16, 200 << 10) is first.get("text", "run", bfloat16, 200 << 10)
    assert "-arch=sm_90a" in compiler.compiled[0]
    assert "-DELEMENT=__nv_bfloat16" in compiler.compiled[0]
    assert compiler.allowed == {3: 200 << 10}
    again = Cubins(compiler.cupy(), AutotuneCache(tmp_path, "this card"))  # the next run of the program
    again.get("text", "run", bfloat16, 200 << 10)
    assert len(compiler.compiled) == compiler.destroyed == 1
    again.get("text", "run", float16, 200 << 10)
    again.get("other text", "run", bfloat16, 200 << 10)
    assert len(compiler.compiled) == 3
    assert compiler.loaded == [b"txet", b"txet", b"txet", b"txet rehto"]


def test_a_text_that_does_not_compile_says_where(compiler: Compiler, tmp_path: Path) -> None:
    cubins = Cubins(compiler.cupy(), AutotuneCache(tmp_path, "this card"))
    with pytest.raises(DeviceFault, match=r"does not compile for sm_90a \(status 6\): line 1: a mistake"):
        cubins.get("a mistake", "run", bfloat16, 0)
    assert compiler.destroyed == 1


def test_what_was_begun_ahead_is_made_once_and_a_mistake_waits_for_who_asks(compiler: Compiler, tmp_path: Path) -> None:
    cubins = Cubins(compiler.cupy(), AutotuneCache(tmp_path, "this card"))
    cubins.ahead((text, "run", bfloat16, 0) for text in ("text", "a mistake", "other text"))
    functions = [cubins.get(text, "run", bfloat16, 0) for text in ("other text", "text", "text")]
    assert functions[1] is functions[2]
    assert len(compiler.compiled) == 2
    with pytest.raises(DeviceFault, match="does not compile"):
        cubins.get("a mistake", "run", bfloat16, 0)


class Encoder:
    """The driver's encoder: remembers what it is told, and writes a number."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.told = status, list[Any]()

    def __call__(self, to: int, kind: int, dims: int, pointer: int, *rest: Any) -> int:
        assert to % 64 == 0
        sizes, strides, box, every = (list(a) for a in rest[:4])
        self.told.append((kind, dims, pointer, sizes, strides, box, every, rest[4:]))
        return self.status


def matrix(gpu: Any, rows: int, columns: int, dtype: Any = bfloat16) -> Any:
    return gpu.kernels.empty((rows, columns), dtype)


def test_a_matrix_is_described_columns_first(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder()
    monkeypatch.setattr(tensor_map, "_encode", lambda: encoder)
    tensor_map._encoded.cache_clear()
    x = matrix(gpu, 100, 256)[:, :200]
    made = tensor_map.tensor_map(x, (128, 64))
    assert made.nbytes == 128
    assert made.shape == (1,)
    assert encoder.told == [(9, 2, x.data.ptr, [200, 100], [512], [64, 128], [1, 1], (0, 3, 3, 0))]
    assert tensor_map.tensor_map(x, (128, 64)) is made
    assert tensor_map.tensor_map(x, (64, 64)) is not made


def test_what_the_driver_cannot_describe_is_said(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "_encode", lambda: Encoder(1))
    tensor_map._encoded.cache_clear()
    with pytest.raises(DeviceFault, match=r"\(10, 24\), dims \(48,\) bytes apart, in tiles \(64, 64\): 1"):
        tensor_map.tensor_map(matrix(gpu, 10, 24, float16), (64, 64))
