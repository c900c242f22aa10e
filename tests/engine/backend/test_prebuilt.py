"""Kernels that an installed package brings compiled: found by all that they were compiled from, or compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.engine.backend.cuda.autotuner import AutotuneCache
from flame_train.engine.backend.cuda.cubin import Cubins
from flame_train.engine.backend.cuda.launch_hooks import LaunchHooks
from flame_train.engine.backend.cuda.nvrtc import KernelModules, file_text, included, options
from flame_train.engine.backend.cuda.prebuilt import PACKAGE, PrebuiltKernels, kernel_path, package_folder
from flame_train.engine.dtype import bfloat16, float16

TEXT = 'extern "C" __global__ void rows() {}'


class CuPy:
    """What of CuPy makes modules: each remembers where it came from."""

    def __init__(self, version: tuple[int, int] = (13, 0), capability: str = "90") -> None:
        self.modules = list[dict[str, Any]]()
        self.cuda = SimpleNamespace(
            nvrtc=SimpleNamespace(getVersion=lambda: version),
            Device=lambda: SimpleNamespace(compute_capability=capability),
            function=SimpleNamespace(Module=lambda: SimpleNamespace(load=self.loaded, get_function=self.function)),
            driver=SimpleNamespace(funcSetAttribute=lambda *_: None),
        )

    def RawModule(self, **given: Any) -> Any:  # noqa: N802
        self.modules.append(given)
        return SimpleNamespace(get_function=self.function)

    def loaded(self, cubin: bytes) -> None:
        self.modules.append({"cubin": cubin})

    @staticmethod
    def function(name: str) -> Any:
        return SimpleNamespace(ptr=len(name), max_dynamic_shared_size_bytes=0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package without kernels."""
    monkeypatch.setattr("flame_train.engine.backend.cuda.nvrtc.header_directory", lambda: "/headers")
    folder = tmp_path / "site" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    assert package_folder() == folder
    return folder


def put(package: Path, version: str, architecture: str, text: str, flags: tuple[str, ...]) -> Path:
    path = kernel_path(package, version, architecture, text, flags)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a kernel")
    return path


def test_a_generated_text_and_a_file_are_taken_from_the_package(package: Path) -> None:
    cupy = CuPy()
    modules = KernelModules(cupy, LaunchHooks())
    file = "ops/norm/group_norm.cu"
    text = put(package, "13.0", "sm_90", included(TEXT), ("-std=c++17",))
    whole = put(package, "13.0", "sm_90", file_text(file), options(bfloat16))
    modules.generated(TEXT, "rows")
    modules.get(file, "group_norm", bfloat16)
    modules.get(file, "group_norm", float16)
    assert cupy.modules[:2] == [{"path": str(text)}, {"path": str(whole)}]
    assert set(cupy.modules[2]) == {"code", "options"}


@pytest.mark.parametrize(
    ("version", "capability", "text"), [((13, 1), "90", TEXT), ((13, 0), "89", TEXT), ((13, 0), "90", TEXT + "\n")]
)
def test_a_kernel_of_another_compiler_card_or_text_is_compiled(
    package: Path, version: tuple[int, int], capability: str, text: str
) -> None:
    put(package, "13.0", "sm_90", TEXT, ("-std=c++17",))
    cupy = CuPy(version, capability)
    KernelModules(cupy, LaunchHooks()).generated(text, "rows")
    assert cupy.modules == [{"code": text, "options": ("-std=c++17",)}]


def test_kernels_for_hopper_alone_are_taken_too_and_nothing_is_kept_of_them(package: Path, tmp_path: Path) -> None:
    put(package, "13.0", "sm_90a", TEXT, options(bfloat16))
    cupy, kept = CuPy(), tmp_path / "choices"
    Cubins(cupy, AutotuneCache(kept, "this card")).get(TEXT, "rows", bfloat16, 0)
    assert cupy.modules == [{"cubin": b"a kernel"}]
    assert not kept.exists()


def test_where_headers_lie_makes_no_other_kernel_and_their_types_do(package: Path) -> None:
    def named(*flags: str) -> Path:
        return kernel_path(package, "13.0", "sm_90", TEXT, flags)

    assert named("-DELEMENT=float", "-I/here") == named("-DELEMENT=float", "-I/there")
    assert len({named("-DELEMENT=float"), named("-DELEMENT=__half"), named("-ftz=true")}) == 3


def test_without_the_package_no_compiler_is_asked_for_its_version() -> None:
    assert PrebuiltKernels(SimpleNamespace(), "sm_90").find(TEXT, ()) is None
