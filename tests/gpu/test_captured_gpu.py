"""Whole networks' captured steps give the bits of eager ones, whatever is recomputed, stored, added up or skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flame_train.config.load import from_options
from flame_train.engine import capture
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic, mode
from flame_train.run.train.step_state import build_optimizer
from flame_train.tools import bench
from flame_train.training.step import micro, update

pytestmark = pytest.mark.gpu

MODELS = ["sdxl-tiny", "sd3-tiny", "flux-tiny"]
STEPS = 10
Way = Callable[[Callable[[], None]], Callable[[], None]]


def trained(case: bench.BenchCase, way: Way, prepared: Callable[[Any], Any] = lambda p: p, micros: int = 1) -> Any:
    """The optimizer after ten steps of `micros` batches each; in fp16 the sixth overflows."""
    with deterministic(True):
        p = prepared(bench.prepare(case))
        part, end = way(lambda: micro(p.state, p.batch)), way(lambda: update(p.state))
        for i in range(STEPS):
            for _ in range(micros):
                part()
            if i == 5 and case.precision == "fp16":
                p.state.optimizer.arena.grads[:1] = math.inf
            end()
        p.backend.synchronize()
        return p.state.optimizer


def captured(fn: Callable[[], None]) -> Callable[[], None]:
    return capture(fn, "cuda")


def eager(fn: Callable[[], None]) -> Callable[[], None]:
    return fn


def bits(optimizer: Any) -> dict[str, np.ndarray]:
    """Everything that a checkpoint holds."""
    values = optimizer.arena.backend.to_host(optimizer.arena.values)
    return {name: np.asarray(value) for name, value in optimizer.state_dict().items()} | {"values": values.copy()}


def check(case: bench.BenchCase, **how: Any) -> dict[str, np.ndarray]:
    one, other = (bits(trained(case, way, **how)) for way in (eager, captured))
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)
    return one


_MASKED = ("lora.min_rank=4", "loss.contrastive_scale=[2.0, 4.0]", "loss.contrastive_schedule=sigma")
_LOCON = {"settings": ("lora.kind=locon", "lora.conv_rank=4", "lora.targets=*")}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"checkpointing": "mlp"},
        {"checkpointing": "full"},
        {"checkpointing": "offload"},
        {"checkpointing": "full", "settings": ("model.offload=1.0",)},
        {"checkpointing": "offload", "settings": ("model.offload=0.5",), "quantize": "fp8"},
        {"quantize": "fp8"},
        {"quantize": "fp8", "arithmetic": "fp8"},
        {"quantize": "int8", "arithmetic": "int8"},
        {"quantize": "nf4"},
        *({"settings": ("lora.kind=" + kind,)} for kind in ("loha", "lokr", "dora")),
        _LOCON,
        {"settings": _MASKED},
        {"settings": (*_MASKED, "lora.dropout=0.1"), "checkpointing": "full", "quantize": "fp8"},
        {"settings": ("lora.kind=dora", "lora.wd_on_output=true"), "checkpointing": "full"},
        {"settings": ("lora.kind=loha", "lora.targets=*"), "quantize": "fp8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_ten_captured_steps_equal_ten_eager_ones(model: str, how: dict[str, Any]) -> None:
    if how is _LOCON and model == "flux-tiny":
        pytest.skip("LoCon wants convolutions, and Flux has none")
    found = check(bench.BenchCase(model, 128, batch=2, rank=16, **how))
    assert all(np.isfinite(v).all() for v in found.values() if v.dtype.kind == "f")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_so_do_steps_of_several_batches_with_noise_and_an_average(precision: Any) -> None:
    config = from_options(
        train={"precision": precision, "steps": 100, "ema_decay": 0.9},
        gradient={"accumulation": 3, "noise_std": 1e-4, "clip_norm": 1.0},
    )

    def prepared(p: Any) -> Any:
        parameters = list(p.state.optimizer.arena.parameters.values())
        return replace(
            p,
            state=replace(
                p.state,
                optimizer=build_optimizer(
                    parameters, config.train, config.optimizer, config.schedule, config.gradient, p.backend
                ),
            ),
        )

    found = check(bench.BenchCase("sdxl-tiny", 128, batch=2, rank=16, precision=precision), prepared=prepared, micros=3)
    assert (found["skipped"] > 0) == (precision == "fp16")


@pytest.mark.parametrize("how", [{}, {"quantize": "fp8"}, {"settings": ("lora.kind=dora",)}], ids=str)
@pytest.mark.parametrize("share", ["0.4", "1.0"])
@pytest.mark.parametrize(
    "model", [*MODELS, "zimage-tiny", "flux2-tiny", "flux2-dev-tiny", "flux3-tiny", "qwen-image-tiny"]
)
def test_blocks_streamed_from_the_host_train_to_the_bits_of_resident_ones(
    model: str, share: str, how: dict[str, Any]
) -> None:
    settings = how.get("settings", ())
    resident = bench.BenchCase(model, 128, batch=2, rank=16, checkpointing="full", **how)
    streamed = replace(resident, settings=(*settings, f"model.offload={share}"))
    one, other = (bits(trained(trial, captured)) for trial in (resident, streamed))
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("model", ["flux-tiny", "sdxl-tiny"])
def test_a_step_whose_recording_found_no_memory_is_recorded_again(
    model: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends at a share of what the first recording asks for, while weights and inputs wait on the host."""
    settings = ("model.offload=1.0", "lora.dropout=0.3")
    case = bench.BenchCase(model, 128, batch=2, rank=16, checkpointing="offload", settings=settings)
    backend, asked, ends_at = get_backend("cuda"), 0, math.inf
    given = backend._graph_malloc

    def malloc(size: int) -> Any:
        nonlocal asked, ends_at
        if mode().capturing:
            asked += 1
            if asked > ends_at:
                ends_at = math.inf
                raise backend.xp.cuda.memory.OutOfMemoryError(size, size)
        return given(size)

    monkeypatch.setattr(backend, "_graph_malloc", malloc)
    expected, whole = bits(trained(case, captured)), asked
    asked, ends_at = 0, int(share * whole)
    found = bits(trained(case, captured))
    assert asked > whole, "recorded once"
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
