"""The wheel of compiled kernels: what a run launches is what the program will look for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.engine.backend.cuda.launch_hooks import LaunchHooks
from flame_train.engine.backend.cuda.nvrtc import KernelModules
from flame_train.engine.shape_run import H100
from flame_train.run.check.check_run import check
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_kernel_that_a_run_requests_is_found_in_what_is_built(
    small_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    kernels_wheel = importlib.import_module("kernels_wheel")
    monkeypatch.setattr("flame_train.engine.backend.cuda.nvrtc.header_directory", lambda: "/headers")
    plan = make_plan(check(small_config(train={"precision": "bf16"})), StopRequest())
    requests = predicted_memory(plan, H100).kernels
    compiled = list[tuple[str, ...]]()

    def compile_program(program: Any, flags: tuple[str, ...]) -> None:
        compiled.append(flags)

    nvrtc = SimpleNamespace(
        getVersion=lambda: (13, 0),
        createProgram=lambda text, *_: text,
        compileProgram=compile_program,
        getCUBIN=lambda text: text[:9].encode(),
        destroyProgram=lambda _: None,
        NVRTCError=RuntimeError,
    )
    wanted = [*dict.fromkeys(kernels_wheel.kernels(requests, "sm_90"))]
    size = kernels_wheel.build(tmp_path, wanted, SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)))
    assert size == 9 * len(wanted) == 9 * len(compiled)
    assert {flags[-1] for flags in compiled} <= {"-arch=sm_90", "-arch=sm_90a"}
    monkeypatch.setattr("flame_train.engine.backend.cuda.prebuilt.package_folder", lambda: tmp_path)
    made = list[dict[str, Any]]()

    def raw_module(**given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(get_function=lambda _: SimpleNamespace(max_dynamic_shared_size_bytes=0))

    cuda = SimpleNamespace(nvrtc=nvrtc, Device=lambda: SimpleNamespace(compute_capability="90"))
    modules = KernelModules(SimpleNamespace(cuda=cuda, RawModule=raw_module), LaunchHooks())
    for text, kernel in requests.texts:
        modules.generated(text, kernel)
    for request in requests.files:
        modules.get(*request)
    assert len(requests.texts) > 20
    assert all(set(given) == {"path"} for given in made)
