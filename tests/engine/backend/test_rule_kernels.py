"""Rules that look at more than an element, without a GPU: their kernels, compiled as C++, do what NumPy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine import Parameter
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.optim import (
    EMA,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    fused,
    update,
)
from flame_train.engine.optim.update import FusedUpdate, ReferenceUpdate
from flame_train.optimizers import OPTIMIZERS, factored
from flame_train.schedules.rex import Rex

SHAPES = {
    "down": (4, 700),
    "up": (150, 4),
    "rank": (37, 16),
    "tiles": (9, 160),
    "many tiles": (140, 132),
    "odd": (33, 7),
    "shifted": (6, 8),
    "conv": (8, 40, 3, 3),
    "point": (36, 4, 1, 1),
    "small": (3, 5, 2, 2),
    "vector": (70,),
    "one": (1,),
}
"""With blocks of 64 threads: in one tile or several, read once or twice; and those that cannot be read by fours."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("schedule_free_adamw", {"weight_decay": 0.1}),
    ("prodigy", {"d0": 1e-3, "weight_decay": 0.1, "growth_rate": 1.5}),
    ("prodigy", {"d0": 1e-3, "use_bias_correction": True, "safeguard_warmup": True}),
    ("adamw8bit", {"weight_decay": 0.1}),
    ("adafactor", {"beta1": 0.9, "weight_decay": 0.1, "scale_parameter": True}),
    ("adafactor", {"relative_step": True, "clip_threshold": 0.3}),
    ("came", {"weight_decay": 0.1}),
    ("automagic", {"weight_decay": 0.1, "start_lr": 1e-4, "lr_bump": 1e-4, "clip_threshold": 0.5}),
    ("prodigy_schedule_free", {"d0": 1e-3, "weight_decay": 0.1}),
    ("prodigy_schedule_free", {"d0": 1e-3, "factored": False, "d_limiter": False, "schedulefree_c": 8.0}),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
EXACT = ("schedule_free_adamw", "adamw8bit")
LINKS = [ClipValue(15.0), ClipNorm(50.0), GradientNoise(0.01, seed=7)]


ELSEWHERE = {"adamw", "sgd", "lion", "muon"}
"""Rules that `test_update_kernels.py` compares, and one that runs operation by operation."""


def test_no_optimizers_rule_is_left_out() -> None:
    assert {name for name, _ in CASES} | ELSEWHERE == set(OPTIMIZERS)


def make(device: str, name: str, keys: dict[str, Any], links: list[Any]) -> Optimizer:
    rng = np.random.default_rng(0)
    ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in SHAPES.items()]
    arena = FlatParameters(
        ps,
        get_backend(device),
        compute_dtype=bfloat16 if links else float32,
        lr_scale={"up": 4.0} if links else None,
        decay_scale={"odd": 0.5},
    )
    more: dict[str, Any] = {"scaler": LossScaler(init=4.0), "average": EMA(0.9)} if links else {}
    lr = 1.0 if OPTIMIZERS[name](**keys).lr_is_factor else 0.01
    return Optimizer(
        arena, [*links, OPTIMIZERS[name](**keys).rule()], lr=lr, accumulation=2, schedule=Rex().build(9, 1, 0.0), **more
    )


def trained(o: Optimizer, device: str, steps: range) -> dict[str, np.ndarray]:
    """Everything after some steps, of which one overflows."""
    for i in steps:
        rng = np.random.default_rng(i)
        for p in o.arena.parameters.values():
            g = rng.standard_normal(p.shape).astype(np.float32) * np.float32(np.inf if i == 2 else 20.0)
            p.grad.data[...] = get_backend(device).to_device(g + np.float32(3.0))
        o.step()
    get = o.arena.backend.to_host
    found = {**o.arena.state(), **o.state_dict(), "metrics": get(o.metric_values).copy()}
    found["padding"] = np.concatenate([get(o.arena.values)[a:b] for a, b in o.arena.padding])
    return found


@pytest.mark.parametrize("links", [[], pytest.param(LINKS, marks=pytest.mark.proof)], ids=["alone", "behind links"])
def test_kernels_do_what_the_reference_does(gpu: Any, compiled: Any, links: list[Any], monkeypatch: Any) -> None:
    """To the bit where no sum is involved; else as far as the order of sums allows."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(factored, "THREADS", 64)
    monkeypatch.setattr(fused, "_SUM_BLOCKS", 3)
    monkeypatch.setattr(update, "_BLOCKS", 3)
    for case in CASES:
        trained(make("cuda", *case, links), "cuda", range(1))
    compiled.build()
    for name, keys in CASES:
        reference, o = make("cpu", name, keys, links), make("cuda", name, keys, links)
        assert isinstance(reference._update, ReferenceUpdate)
        assert isinstance(o._update, FusedUpdate)
        wanted, found = trained(reference, "cpu", range(5)), trained(o, "cuda", range(5))
        assert found.keys() == wanted.keys()
        for entry, value in wanted.items():
            if found[entry].dtype in (np.uint8, np.bool_) and name == "automagic":
                assert np.mean(found[entry] != value) < 0.01, f"{entry} of {name}"
                continue
            tolerance = 0.0 if name in EXACT and entry != "metrics" else 2e-5
            np.testing.assert_allclose(
                found[entry], value, rtol=tolerance, atol=tolerance * 0.1, err_msg=f"{entry} of {name} {keys}"
            )
        assert not found["padding"].any()
        first, second = make("cuda", name, keys, links), make("cuda", name, keys, links)
        trained(first, "cuda", range(2))
        second.arena.load_state(first.arena.state())
        second.load_state_dict(first.state_dict())
        for entry, value in trained(second, "cuda", range(2, 5)).items():
            if entry != "metrics":
                np.testing.assert_array_equal(value, found[entry], err_msg=f"{entry} of {name}, continued")


LAUNCHES = {"prodigy": ["prodigy_terms", "scalars", "prodigy"], "automagic": ["automagic", "scalars"]}
LAUNCHES["prodigy_schedule_free"] = ["prodigy_schedule_free", "scalars"]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_an_update_takes_five_launches_at_most(gpu: Any, name: str) -> None:
    o, told = make("cuda", name, {}, []), list[str]()
    o.arena.values.operations.clear()
    with gpu.kernels.launch_hooks.hooked(lambda kernel, _: told.append(kernel) or True):
        o.step()
    assert told == ["squares", "scalars", *LAUNCHES.get(name, [name])]
    assert not o.arena.values.operations, "nothing is done besides"
