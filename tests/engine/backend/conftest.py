"""Fixtures for tests of the CUDA backend without a GPU: its own code over the stand-in for CuPy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.engine import backend as backends
from flame_train.engine.backend import cuda
from flame_train.engine.backend.cuda import device, nvrtc
from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.backend.shapes.driver import H100
from flame_train.engine.ops.attention import short_kv, wgmma
from flame_train.engine.ops.linear import skinny_gemm
from tests.engine.backend.stand_in import Card, Cubins, Graph, NoPairs, OnDevice, Plans, Products, StandIn


@pytest.fixture
def card() -> Card:
    """What stands in for a GPU; a test may name another."""
    return H100


@pytest.fixture
def gpu(card: Card, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend over the stand-in."""
    cupy = StandIn(card)
    monkeypatch.setattr(OnDevice.device, "compute_capability", card.capability)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(device, "_import_cupy", lambda index: cupy)
    monkeypatch.setattr(nvrtc, "header_directory", lambda: "")
    monkeypatch.setattr(device, "Graph", Graph)
    monkeypatch.setattr(cuda, "_STATE", {})
    made = backends.get_backend("cuda")
    made.kernels.cublaslt, made.kernels.cudnn, made.kernels.dual_gemms = Products(), Plans(), NoPairs()
    made.kernels._cubins = Cubins(card)
    monkeypatch.setattr(tensor_map, "_encode", lambda: lambda *_: 0)
    real = backends.backend_of
    for name in ("tensors.tensor_base", "random"):
        monkeypatch.setattr(
            sys.modules[f"flame_train.engine.{name}"],
            "backend_of",
            lambda a: made if isinstance(a, OnDevice) else real(a),
        )
    return made


@pytest.fixture
def same_layout(compiler: None, tmp_path: Path) -> Callable[[str, Mapping[str, np.dtype[Any]]], None]:
    """Checks that structs of a kernel's text are laid out as what is passed, by a C++ compiler's word."""

    def check(text: str, structs: Mapping[str, np.dtype[Any]]) -> None:
        lines = ["#include <cstddef>", "typedef short T;", "typedef unsigned long long u64;"]
        for name, dtype in structs.items():
            found = re.search(rf"^struct (alignas\(\d+\) )?{name} {{.*?}};$", text, re.MULTILINE | re.DOTALL)
            assert found is not None, f"no struct {name}"
            lines += [line for line in found[0].splitlines() if "__device__" not in line]
            lines += [f"static_assert(sizeof({name}) == {dtype.itemsize});"]
            lines += [f"static_assert(offsetof({name}, {n}) == {dtype.fields[n][1]});" for n in dtype.names]
        source = tmp_path / "structs.cpp"
        source.write_text("\n".join(lines))
        subprocess.run(["g++", "-std=c++17", "-fsyntax-only", source], check=True)

    return check


class Launched:
    """What was launched: by kernel's name its grid, block, arguments and shared memory, and its text if generated."""

    def __init__(self) -> None:
        self.by_name = dict[str, tuple[Any, ...]]()
        self.texts = dict[str, str]()

    def plain(self, file: str, kernel: str, dtype: Any, grid: Any, block: int, args: Any, shared: int = 0) -> None:
        self.by_name[kernel] = grid, block, args, shared

    def here(self, text: str, kernel: str, dtype: Any, grid: Any, block: int, args: Any, shared: int) -> None:
        self.by_name[kernel], self.texts[kernel] = (grid, block, args, shared), text


@pytest.fixture
def launched(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launches are noted instead; in place of a description of tiles stands what it would be of."""
    noted = Launched()
    for module in (wgmma, short_kv, skinny_gemm):
        monkeypatch.setattr(module, "tensor_map", lambda x, tile: (x.shape, tile))
    monkeypatch.setattr(gpu.kernels, "launch", noted.plain)
    monkeypatch.setattr(gpu.kernels, "launch_sm90", noted.here)
    return noted
