"""An optimizer's step in three launches, without a GPU: compiled as C++, its kernels give the bits of NumPy's links."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from flame_train.config.schema import Config
from flame_train.config.training_sections import GradientSection, OptimizerSection, TrainSection
from flame_train.engine import Parameter, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.optim import (
    EMA,
    METRICS,
    AdamWRule,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    Schedule,
    SGDRule,
    update,
)
from flame_train.engine.optim.update import FusedUpdate, ReferenceUpdate
from flame_train.optimizers.lion import LionRule
from flame_train.run.train.step_state import build_optimizer
from flame_train.schedules.rex import Rex
from flame_train.schedules.warmup_stable_decay import WarmupStableDecay
from tests.engine.conftest import some_and_proof

SHAPES = {"a": (300, 7), "b": (65,), "c": (1,), "d": (128,)}
LINKS = [ClipValue(0.3), ClipNorm(5.0), GradientNoise(0.01, seed=2**63 + 5)]
RULES = [
    AdamWRule(),
    SGDRule(),
    AdamWRule((0.8, 0.95), 1e-6, 0.1),
    SGDRule(0.9, weight_decay=0.1),
    SGDRule(0.5, 0.25),
    SGDRule(0.9, nesterov=True, weight_decay=0.1),
    LionRule((0.9, 0.99), 0.1),
]
SETTINGS: list[dict[str, Any]] = [
    {"schedule": Schedule("cosine", 6, 2, min_lr=1e-3), "accumulation": 2},
    {"schedule": Schedule("linear", 20, 3), "scaler": LossScaler(init=64.0, interval=2)},
    {"schedule": Schedule("cosine_restarts", 7, cycles=3), "average": EMA(0.3)},
    {"schedule": Schedule("polynomial", 9, 1, power=1.7), "scaler": LossScaler(init=2.0, interval=4)},
    {"average": EMA(0.9), "scaler": LossScaler(init=1.0), "accumulation": 3},
    {"schedule": Schedule("inverse_sqrt", warmup=2, timescale=3, min_lr=1e-3)},
    {"schedule": Rex(rex_d=0.9).build(9, 1, 1e-4), "accumulation": 2},
    {"schedule": WarmupStableDecay(decay=0.5, decay_shape="1-sqrt").build(8, 1, 0.0)},
]
WORKING = [float32, bfloat16, bfloat16]
CASES = [
    ([*links, rule], SETTINGS[(i + j) % len(SETTINGS)] | {"halt": j % 2 == i % 2}, WORKING[(i + j) % len(WORKING)])
    for i, links in enumerate(links for n in range(4) for links in itertools.combinations(LINKS, n))
    for j, rule in enumerate(RULES)
]


def make(device: str, links: list[Any], settings: dict[str, Any], compute_dtype: Any) -> Optimizer:
    rng = np.random.default_rng(0)
    ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in SHAPES.items()]
    factors = {"lr_scale": {"a": 0.5}, "decay_scale": {"b": 0.0}} if "average" in settings else {}
    return Optimizer(
        FlatParameters(ps, get_backend(device), compute_dtype=compute_dtype, **factors), links, lr=0.01, **settings
    )


def trained(o: Optimizer, device: str, steps: range = range(8)) -> dict[str, np.ndarray]:
    """Everything after eight steps, of which one overflows and one has a loss that is no number."""
    get = o.arena.backend.to_host
    for i in steps:
        rng = np.random.default_rng(i)
        for p in o.arena.parameters.values():
            g = rng.standard_normal(p.shape).astype(np.float32) * np.float32(math.inf if i == 3 else 20.0)
            p.grad.data[...] = get_backend(device).to_device(g)
        given = [np.float32(0.5), np.array([0.1, math.nan if i == 4 else 2.0, 3.0], np.float32), None][i % 3]
        loss = None if given is None else tensor(given, device=device)
        o.step(tensor(np.array([1.0, math.nan, 2.0]), device=device)[::2] if i == 6 else loss)
    found = {**o.arena.state(), **o.state_dict(), "healthy": get(o._scalars["healthy"])}
    found |= {f"metrics.{n}": v for n, v in zip(METRICS, get(o.metric_values), strict=True)}
    found["padding"] = np.concatenate([get(o.arena.values)[a:b] for a, b in o.arena.padding])
    return found if o.arena.compute_values is None else {**found, "low": get(o.arena.compute_values).astype(np.float32)}


@some_and_proof(5)
def test_one_pass_gives_the_bits_of_the_links(
    gpu: Any, compiled: Any, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a schedule's cosine and power may be a unit off: NumPy has its own."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(update, "_BLOCKS", 3)
    monkeypatch.setattr(GradientNoise, "CHUNK", 256)
    for case in CASES[::every]:
        trained(make("cuda", *case), "cuda")
    compiled.build()
    skipped = set[float]()
    for case in CASES[::every]:
        reference, o = make("cpu", *case), make("cuda", *case)
        assert isinstance(reference._update, ReferenceUpdate)
        assert isinstance(o._update, FusedUpdate)
        wanted, found = trained(reference, "cpu"), trained(o, "cuda")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            exact = 1e-14 if name == "metrics.lr" else 0.0
            np.testing.assert_allclose(found[name], value, rtol=exact, atol=0.0, err_msg=f"{name} of {case}")
        assert not found["padding"].any()
        skipped.add(float(found["skipped"]))
        if found["healthy"]:
            first, second = make("cuda", *case), make("cuda", *case)
            trained(first, "cuda", range(4))
            second.arena.load_state(first.arena.state())
            second.load_state_dict(first.state_dict())
            for name, value in trained(second, "cuda", range(4, 8)).items():
                np.testing.assert_array_equal(value, found[name], err_msg=f"{name} of {case}, continued")
    assert {2.0, 5.0} <= skipped, "some that halt at what is not finite, and some that go on"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rule", [{}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}, {"name": "lion"}], ids=str)
def test_every_chain_that_a_config_may_ask_for_takes_three_launches(gpu: Any, rule: Any, precision: Any) -> None:
    kernel = rule.get("name", "adamw")
    for value, norm, noise, mean in itertools.product((0.0, 0.5), (0.0, 1.0), (0.0, 0.1), (0.0, 0.9)):
        config = Config(
            optimizer=OptimizerSection(**rule),
            train=TrainSection(precision=precision, ema_decay=mean),
            gradient=GradientSection(clip_value=value, clip_norm=norm, noise_std=noise, accumulation=2),
        )
        weights = [Parameter(np.ones(70, np.float32), "w")]
        o = build_optimizer(weights, config.train, config.optimizer, config.schedule, config.gradient, gpu)
        loss, told = tensor(np.float32(1.0), device="cuda"), list[str]()
        o.arena.values.operations.clear()
        with gpu.kernels.launch_hooks.hooked(lambda name, _, told=told: told.append(name) or True):
            o.step(loss)
        assert told == ["squares", "scalars", kernel]
        assert not o.arena.values.operations, "single numbers cost no launch of their own"


def test_a_loss_from_elsewhere_is_refused(gpu: Any) -> None:
    o = make("cuda", [AdamWRule()], {}, float32)
    with pytest.raises(RuntimeError, match=r"loss is on cpu.*on cuda"):
        o.step(tensor(1.0))


def test_chains_in_another_order_go_link_by_link(gpu: Any) -> None:
    for links in ([ClipNorm(1.0), ClipValue(1.0), AdamWRule()], [AdamWRule(), ClipNorm(1.0)]):
        assert isinstance(make("cuda", links, {}, float32)._update, ReferenceUpdate)
