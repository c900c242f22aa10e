"""Random numbers, optimizer and objective on the GPU: against the CPU, and captured against eager."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.config.load import from_options
from flame_train.config.schema import LossSection
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.weightings.min_snr import MinSnr
from flame_train.engine import Parameter, Tensor, capture, tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16, float16, float32
from flame_train.engine.optim import (
    EMA,
    AdamWRule,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    Schedule,
    SGDRule,
    clip_grad_norm_,
    normalize,
)
from flame_train.engine.optim.update import FusedUpdate, ReferenceUpdate
from flame_train.engine.random import Rng
from flame_train.optimizers import OPTIMIZERS
from flame_train.run.train.step_state import build_optimizer
from tests.run_files import lora_of

pytestmark = pytest.mark.gpu

SHAPES = {"a": (300, 7), "b": (65,)}
RULES = {"adamw": AdamWRule(), "sgd": SGDRule(0.9, weight_decay=0.1, nesterov=True)}
LINKS = [ClipValue(0.2), ClipNorm(5.0), GradientNoise(0.01, seed=2**63 + 5)]
SCHEDULES = {
    "constant": Schedule(),
    "linear": Schedule("linear", 20, 3),
    "cosine": Schedule("cosine", 6, 2, min_lr=1e-3),
    "cosine_restarts": Schedule("cosine_restarts", 7, cycles=3),
    "polynomial": Schedule("polynomial", 9, 1, power=1.7),
}


def optimizer(
    device: str, rule: str, schedule: Any = "cosine", scaled: bool = True, way: Any = FusedUpdate
) -> Optimizer:
    rng = np.random.default_rng(0)
    ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in SHAPES.items()]
    links = [*(LINKS if way is FusedUpdate else [LINKS[1], LINKS[0], LINKS[2]]), RULES[rule]]
    scaler = LossScaler(interval=4) if scaled else None
    return Optimizer(
        FlatParameters(ps, get_backend(device)),
        links,
        lr=0.01,
        schedule=SCHEDULES[schedule],
        scaler=scaler,
        accumulation=2,
        average=EMA(0.9),
    )


def everything(o: Optimizer) -> dict[str, np.ndarray]:
    metrics = get_backend("cuda" if o.arena.values.__class__.__module__ != "numpy" else "cpu").to_host(o.metric_values)
    return {**o.arena.state(), **o.state_dict(), "metrics": metrics.copy()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_those_on_the_cpu(rule: str, schedule: str) -> None:
    """To a few ulp: pow and cos are the device's own."""
    results = []
    for device in ("cpu", "cuda"):
        o = optimizer(device, rule, schedule)
        rng = np.random.default_rng(1)
        for i in range(12):
            o.zero_grad()
            for p in o.arena.parameters.values():
                g = rng.standard_normal(p.shape).astype(np.float32) * np.float32(math.inf if i == 5 else 1e4)
                p.grad.data[...] = get_backend(device).to_device(g)
            o.step()
        results.append(everything(o))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert results[1]["skipped"] == 1


@pytest.mark.parametrize("way", [FusedUpdate, ReferenceUpdate])
@pytest.mark.parametrize("rule", RULES)
def test_a_captured_training_step_equals_the_eager_one_bit_for_bit(rule: str, way: Any) -> None:
    """Noise, timesteps, loss, backward and update in one graph; an overflow on the way is skipped inside it."""
    results = []
    for captured in (False, True):
        o = optimizer("cuda", rule, way=way)
        assert isinstance(o._update, way)
        xp = o.arena.backend.xp
        noise = Noise.of(
            LossSection(
                offset_noise=0.1,
                offset_noise_random=True,
                offset_noise_adaptive=0.1,
                pyramid_noise=3,
                immiscible_noise=True,
                input_perturbation=0.1,
            )
        )
        objective = Objective(
            NoiseSchedule.scaled_linear(), "v", weighting=MinSnr(snr_gamma=5.0), noise=noise, device="cuda"
        )
        latents = tensor(np.random.default_rng(2).standard_normal((4, 5, 3, 7)).astype(np.float32), device="cuda")
        samples, bad = xp.arange(4), tensor(np.ones((), np.float32), device="cuda")
        a, b = o.arena.parameters["a"], o.arena.parameters["b"]

        def step(
            o: Optimizer = o,
            objective: Objective = objective,
            latents: Tensor = latents,
            samples: Any = samples,
            bad: Tensor = bad,
            a: Tensor = a,
            b: Tensor = b,
            xp: Any = xp,
        ) -> None:
            o.zero_grad()
            rng = Rng(xp, 9, o.count, samples)
            noise, t = objective.noise(rng, latents), objective.timesteps(rng)
            h = F.linear(objective.noised(latents, objective.mixed(rng, noise), t), a, None).sum(-1, keepdim=True)
            loss = objective.losses(h * latents + b.square().mean(), latents, noise, t).mean()
            (loss * bad * o.loss_scale).backward()
            o.step(loss)

        run = capture(step, "cuda") if captured else step
        for i in range(10):
            bad.data[...] = math.inf if i == 6 else 1.0
            run()
        results.append(everything(o))
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value, err_msg=name)
    assert results[1]["skipped"] == 1
    assert results[1]["count"] == 9


@pytest.mark.parametrize(
    ("schedule", "compute_dtype"),
    [*zip(SCHEDULES, (bfloat16, float32, float16, bfloat16, float32), strict=True)],
    ids=str,
)
@pytest.mark.parametrize("rule", [*RULES.values(), SGDRule(), AdamWRule((0.8, 0.95), 1e-6, 0.1)], ids=str)
def test_one_pass_gives_the_bits_of_the_links(rule: Any, schedule: str, compute_dtype: Any) -> None:
    """For every chain that a config can ask for, over more than one chunk of noise."""
    for links in (links for n in range(4) for links in itertools.combinations(LINKS, n)):
        results = []
        for way in (FusedUpdate, ReferenceUpdate):
            rng = np.random.default_rng(0)
            shapes = {**SHAPES, "c": (1100, 1000)} if links == tuple(LINKS) else SHAPES
            ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in shapes.items()]
            arena = FlatParameters(
                ps, get_backend("cuda"), compute_dtype=compute_dtype, lr_scale={"a": 0.5}, decay_scale={"b": 0.0}
            )
            o = Optimizer(
                arena,
                [*links, rule],
                lr=0.01,
                scaler=LossScaler(interval=4),
                accumulation=3,
                schedule=SCHEDULES[schedule],
                average=EMA(0.9),
            )
            assert isinstance(o._update, FusedUpdate)
            o._update = way(o._buffers)
            for i in range(8):
                for p in arena.parameters.values():
                    g = rng.standard_normal(p.shape).astype(np.float32) * np.float32(math.inf if i == 5 else 1e5)
                    p.grad.data[...] = get_backend("cuda").to_device(g)
                o.step(tensor(np.array([0.5, math.nan if i == 3 else 1.0], np.float32), device="cuda"))
            low = [p.compute_copy.numpy() for p in ps] if compute_dtype != float32 else []
            results.append({**everything(o), **{f"low {i}": x for i, x in enumerate(low)}})
        for name, value in results[1].items():
            np.testing.assert_array_equal(results[0][name], value, err_msg=f"{name} after {links}")
        assert results[0]["skipped"] == 2


# ---- every optimizer that a config can choose ----------------------------------------------------------------------

DEVICE = "cuda"
ARMED = Path(__file__).parents[1] / "faults" / "armed.py"
LORA = {
    "down": (16, 1280),
    "up": (1280, 16),
    "conv": (16, 320, 3, 3),
    "odd": (33, 7),
    "tall": (5120, 16),
    "vector": (70,),
}


def chosen(device: str, name: str) -> Optimizer:
    """As a run has it, behind clipping, with LoRA+ and a warm-up."""
    rng = np.random.default_rng(0)
    ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in LORA.items()]
    rate = 1.0 if OPTIMIZERS[name]().lr_is_factor else 0.01
    config = from_options(
        train={"precision": "bf16", "steps": 100},
        optimizer={"name": name, "lr": rate, "lora_plus_ratio": 4.0},
        schedule={"name": "constant", "warmup_steps": 2},
        gradient={"clip_norm": 400.0},
    )
    return build_optimizer(
        ps, config.train, config.optimizer, config.schedule, config.gradient, get_backend(device), "up"
    )


def gradients(o: Optimizer, step: int) -> None:
    rng = np.random.default_rng(step)
    for p in o.arena.parameters.values():
        g = rng.standard_normal(p.shape).astype(np.float32) * np.float32(math.inf if step == 4 else 1.0)
        p.grad.data[...] = o.arena.backend.to_device(g + np.float32(0.5))


def after(o: Optimizer, steps: range, run: Any = None) -> dict[str, np.ndarray]:
    for i in steps:
        gradients(o, i)
        (run or o.step)()
        o._scalars["healthy"][...] = True  # as after a resume: the overflow does not end the run
    return {**o.arena.state(), **o.state_dict(), "metrics": o.arena.backend.to_host(o.metric_values).copy()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_does_what_it_does_on_the_cpu(name: str) -> None:
    """Within rounding: sums are in another order. Codes of 8 bits and signs may fall to the other side."""
    found, wanted = (after(chosen(device, name), range(10)) for device in ("cuda", "cpu"))
    assert found.keys() == wanted.keys()
    for entry, value in wanted.items():
        if value.dtype in (np.uint8, np.bool_):
            assert np.mean(found[entry] != value) < 0.01, entry
        elif name == "muon" and "momentum" not in entry:  # its products are in TF32 or fp32, as the card has them
            np.testing.assert_allclose(found[entry], value, rtol=1e-2, atol=1e-3, err_msg=entry)
        else:
            np.testing.assert_allclose(found[entry], value, rtol=1e-4, atol=2e-5, err_msg=entry)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_the_same_twice_captured_and_continued(name: str) -> None:
    first = after(chosen("cuda", name), range(10))
    again = after(chosen("cuda", name), range(10))
    o = chosen("cuda", name)
    captured = after(o, range(10), capture(o.step, "cuda"))
    one, two = chosen("cuda", name), chosen("cuda", name)
    after(one, range(6))
    two.arena.load_state(one.arena.state())
    two.load_state_dict(one.state_dict())
    continued = after(two, range(6, 10))
    for entry, value in first.items():
        np.testing.assert_array_equal(again[entry], value, err_msg=f"{entry}, twice")
        np.testing.assert_array_equal(captured[entry], value, err_msg=f"{entry}, captured")
        np.testing.assert_array_equal(continued[entry], value, err_msg=f"{entry}, continued")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_every_update_but_muons_is_a_few_kernels(name: str) -> None:
    o, told = chosen("cuda", name), list[str]()
    assert isinstance(o._update, FusedUpdate)
    with o.arena.backend.kernels.launch_hooks.hooked(lambda kernel, _: told.append(kernel) or True):
        o.step()
    assert told[:2] == ["squares", "scalars"]
    assert len(told) <= 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    name: str, small_base: Path, drawn: Path, tmp_path: Path
) -> None:
    """The process dies at once while a checkpoint is written, and is started again by the same command."""
    rate = "1.0" if OPTIMIZERS[name]().lr_is_factor else "0.001"

    def run(folder: str, failpoint: str = "") -> int:
        keys = {
            "model.checkpoint": str(small_base),
            "data.path": str(drawn),
            "data.resolution": "96",
            "data.bucket_step": "32",
            "data.batch_size": "2",
            "lora.rank": "4",
            "lora.alpha": "4.0",
            "train.steps": "12",
            "checkpoint.every": "4",
            "output.dir": str(tmp_path / folder),
            "optimizer.name": name,
            "optimizer.lr": rate,
            "schedule.name": "constant",
            "sample.every": "0",
        }
        settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        (tmp_path / "config.toml").write_text("")
        command = [
            sys.executable,
            str(ARMED),
            failpoint,
            "sdxl-lora",
            "--config",
            str(tmp_path / "config.toml"),
            *settings,
        ]
        return subprocess.run([*command, "--device", DEVICE], capture_output=True, timeout=300).returncode

    assert run("whole") == 0
    assert run("killed", "checkpoint.before_rename:2") == -signal.SIGKILL
    assert not (tmp_path / "killed" / "lora.safetensors").exists()
    assert run("killed") == 0
    assert lora_of(tmp_path / "killed") == lora_of(tmp_path / "whole")


def test_state_moves_between_devices() -> None:
    cpu, cuda = optimizer("cpu", "adamw"), optimizer("cuda", "adamw")
    cpu.arena.grads[...] = 0.5
    cpu.step()
    cuda.arena.load_state(cpu.arena.state())
    cuda.load_state_dict(cpu.state_dict())
    for name, value in {**cpu.arena.state(), **cpu.state_dict()}.items():
        np.testing.assert_array_equal({**cuda.arena.state(), **cuda.state_dict()}[name], value)


def test_gradient_tools() -> None:
    x = tensor(np.ones(3), "float32", "cuda", requires_grad=True)
    (x * tensor(np.array([3.0, 4.0, 0.0], np.float32), device="cuda")).sum().backward()
    assert clip_grad_norm_([x], 1.0, math.inf).item() == 4.0
    assert clip_grad_norm_([x], 1.0).item() == pytest.approx(1.25)
    normalize([x], 2.0)
    np.testing.assert_allclose(x.grad.numpy(), [1.2, 1.6, 0.0], rtol=1e-6)
