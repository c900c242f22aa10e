"""What a step does and, when something is not finite, does not do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flame_train.engine import Parameter, Tensor, optim, tensor
from flame_train.engine.optim import (
    METRICS,
    SGD,
    AdamW,
    AdamWRule,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    Schedule,
    SGDRule,
    Transform,
)
from flame_train.engine.optim.transform import global_norm
from flame_train.errors import ModelFileError

SHAPES = {"a": (4, 3), "b": (70,)}


def make(transforms: Sequence[Transform] = (AdamWRule(),), **settings: object) -> Optimizer:
    rng = np.random.default_rng(0)
    ps = [Parameter(rng.standard_normal(s).astype(np.float32), n) for n, s in SHAPES.items()]
    return Optimizer(FlatParameters(ps), transforms, **{"lr": 1e-2, **settings})


def give(optimizer: Optimizer, seed: int, scale: float = 1.0) -> None:
    """Random gradients, times `scale`."""
    rng = np.random.default_rng(seed)
    for p in optimizer.arena.parameters.values():
        p.grad.data[...] = rng.standard_normal(p.shape).astype(np.float32) * np.float32(scale)


def figures(optimizer: Optimizer) -> dict[str, float]:
    return dict(zip(METRICS, optimizer.metric_values.tolist(), strict=True))


def everything(optimizer: Optimizer) -> dict[str, np.ndarray]:
    return {**optimizer.arena.state(), **optimizer.state_dict()}


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


CHAINS: dict[str, tuple[Callable[[], list[Transform]], dict[str, object]]] = {
    "adamw": (lambda: [AdamWRule()], {}),
    "sgd": (lambda: [SGDRule(0.9, weight_decay=0.1, nesterov=True)], {"schedule": Schedule("linear", 20)}),
    "all": (
        lambda: [ClipNorm(0.5), ClipValue(0.1), GradientNoise(0.01, seed=3), AdamWRule()],
        {"schedule": Schedule("cosine", 20, 3), "accumulation": 2, "scaler": LossScaler(interval=3)},
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_resume_is_bit_identical(chain: str) -> None:
    links, settings = CHAINS[chain]
    whole, first = make(links(), **settings), make(links(), **settings)
    for i in range(12):
        give(whole, i, math.inf if chain == "all" and i == 4 else 1e3)
        whole.step()
    for i in range(6):
        give(first, i, math.inf if chain == "all" and i == 4 else 1e3)
        first.step()
    second = make(links(), **settings)
    second.arena.load_state(first.arena.state())
    second.load_state_dict(first.state_dict())
    for i in range(6, 12):
        give(second, i, 1e3)
        second.step()
    equal(everything(whole), everything(second))


@pytest.mark.parametrize("chain", CHAINS)
def test_buffers_never_move(chain: str) -> None:
    links, settings = CHAINS[chain]
    o = make(links(), **settings)

    def addresses() -> list[int]:
        buffers = [a for _, a in o._entries()]
        buffers += [o.arena.values, o.arena.grads, o.metric_values, o.loss_scale.data, o.count]
        buffers += [t for p in o.arena.parameters.values() for t in (p.data, p.grad.data)]
        return [b.ctypes.data for b in buffers]

    before = addresses()
    for i in range(5):
        o.zero_grad()
        give(o, i, math.nan if i == 2 else 1.0)
        o.step()
    assert addresses() == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_without_a_scaler_one_bad_step_halts_training_for_good(bad: float, where: str) -> None:
    o = make(halt=True)
    give(o, 0)
    o.step(tensor([0.5]))
    good = everything(o)
    assert figures(o)["healthy"] == 1.0
    give(o, 1)
    if where == "gradient":
        o.arena.parameters["b"].grad.data[7] = bad
    o.step(tensor([0.1, bad if where == "loss" else 0.2]))
    assert figures(o) | {"grad_norm": 0} == {
        "count": 1,
        "lr": 1e-2,
        "grad_norm": 0,
        "loss_scale": 1,
        "finite": 0,
        "healthy": 0,
        "skipped": 1,
    }
    give(o, 2)
    o.step(tensor([0.1]))
    after = everything(o)
    assert after.pop("skipped") == 2
    good.pop("skipped")
    equal(good, after)
    assert figures(o)["finite"] == 1.0
    assert figures(o)["healthy"] == 0.0


def test_health_is_that_of_the_last_step_where_nothing_halts() -> None:
    o = make()
    seen = []
    for scale in (1.0, math.nan, 1.0):
        give(o, 0, scale)
        o.step()
        seen.append(figures(o)["healthy"])
    assert seen == [1, 0, 1]


def test_a_norm_that_overflows_counts_as_not_finite() -> None:
    o = make()
    o.arena.parameters["a"].grad.data[...] = 3e38
    o.step()
    assert figures(o)["finite"] == 0.0


def test_an_overflow_halves_the_scale_and_advances_nothing() -> None:
    o = make([AdamWRule()], scaler=LossScaler(), schedule=Schedule("linear", 10))
    give(o, 0, 65536.0)
    o.step()
    before = everything(o)
    give(o, 1, math.inf)
    o.step()
    after = everything(o)
    assert after.pop("loss_scaler.scale") == 32768.0
    assert after.pop("loss_scaler.clean") == 0
    assert after.pop("skipped") == 1
    for name in ("loss_scaler.scale", "loss_scaler.clean", "skipped"):
        before.pop(name)
    equal(before, after)
    assert figures(o)["healthy"] == 1.0
    assert figures(o)["loss_scale"] == 65536.0
    assert o.loss_scale.item() == 32768.0
    give(o, 2, 32768.0)
    o.step()
    assert figures(o)["lr"] == pytest.approx(0.9e-2)


def test_scaled_gradients_give_the_unscaled_update() -> None:
    plain, scaled = make(), make(scaler=LossScaler(init=1024.0), accumulation=4)
    for i in range(5):
        give(plain, i)
        give(scaled, i, 4096.0)
        plain.step()
        scaled.step()
    equal(plain.arena.state(), scaled.arena.state())


def test_endless_overflow_reaches_the_minimum_and_halts() -> None:
    o = make(scaler=LossScaler(init=8.0), halt=True)
    values = o.arena.state()
    seen = []
    for _ in range(6):
        give(o, 0, math.nan)
        o.step()
        seen.append((o.loss_scale.item(), figures(o)["healthy"]))
    assert seen == [(4, 1), (2, 1), (1, 1), (1, 0), (1, 0), (1, 0)]
    give(o, 0)
    o.step()
    equal(values, o.arena.state())


def test_clip_norm_and_value_limit_what_the_rule_sees() -> None:
    for transform, size in (
        (ClipNorm(0.25), lambda g: math.sqrt((g.astype(float) ** 2).sum())),
        (ClipValue(0.25), lambda g: abs(g).max()),
    ):
        o = make([transform, SGDRule()], lr=1.0)
        before = o.arena.values.copy()
        give(o, 0, 100.0)
        raw = o.arena.grads.astype(np.float64)
        o.step()
        assert size(before - o.arena.values) == pytest.approx(0.25, rel=1e-4)
        assert figures(o)["grad_norm"] == pytest.approx(math.sqrt((raw**2).sum()), rel=1e-6)
        unclipped = o.arena.values.copy()
        give(o, 1, 1e-3)
        small = o.arena.grads.copy()
        o.step()
        np.testing.assert_allclose(unclipped - o.arena.values, small, atol=3e-7)


@pytest.mark.parametrize(("chain", "passes"), [([ClipNorm(1.0)], 1), ([ClipValue(0.5), ClipNorm(1.0)], 2)])
def test_the_norm_is_taken_again_only_of_a_gradient_that_changed(
    chain: list[Transform], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    def noted(xp: Any, g: np.ndarray) -> np.ndarray:
        seen.append(g.tobytes())
        return global_norm(xp, g)

    for module in ("transform", "update"):
        monkeypatch.setattr(f"flame_train.engine.optim.{module}.global_norm", noted)
    optimizer = make([*chain, SGDRule()])
    give(optimizer, 1)
    optimizer.step()
    assert len(seen) == len(set(seen)) == passes


def test_gradient_noise_has_its_annealed_size_and_spares_the_padding() -> None:
    ps = [Parameter(np.zeros(20_001, np.float32), "w"), Parameter(np.zeros(3, np.float32), "v")]
    o = Optimizer(FlatParameters(ps), [GradientNoise(0.5, seed=1, decay=0.55), SGDRule()], lr=1.0)
    stds, draws = [], []
    for _ in range(4):
        before = o.arena.values.copy()
        o.zero_grad()
        o.step()
        draws.append(before - o.arena.values)
        stds.append(draws[-1][:20_001].std())
    expected = [math.sqrt(0.25 / (1 + t) ** 0.55) for t in range(4)]
    np.testing.assert_allclose(stds, expected, rtol=4 / math.sqrt(2 * 20_001))
    assert abs(np.corrcoef(draws)[0, 1:]).max() < 5 / math.sqrt(20_001)
    assert all((o.arena.values[a:b] == 0).all() for a, b in o.arena.padding)
    assert len(o.arena.padding) == 2


def test_factors_by_name_scale_rate_and_decay() -> None:
    one = np.ones(2, np.float32)
    arena = FlatParameters([Parameter(one, "a"), Parameter(one, "b")], lr_scale={"b": 16.0}, decay_scale={"a": 0.0})
    o = Optimizer(arena, [SGDRule(weight_decay=0.5)], lr=0.01)
    arena.grads[...] = 1.0
    o.step()
    np.testing.assert_allclose(arena.parameters["a"].numpy(), 1 - 0.01 * 1.0)
    np.testing.assert_allclose(arena.parameters["b"].numpy(), 1 - 0.16 * 1.5)


def test_set_changes_a_number_in_its_place() -> None:
    o = make([ClipNorm(1.0), AdamWRule()])
    o.set("lr", 0.5)
    o.set("clip_norm.max_norm", 2.0)
    give(o, 0)
    o.step()
    assert figures(o)["lr"] == 0.5
    with pytest.raises(KeyError, match=r"nothing named 'clip.max'.*clip_norm\.max_norm"):
        o.set("clip.max", 1.0)


def test_a_state_of_another_optimizer_is_refused() -> None:
    adam, sgd = make(), make([SGDRule()])
    with pytest.raises(ModelFileError, match=r"unexpected 'adamw\.exp_avg\.a'"):
        sgd.load_state_dict(adam.state_dict())
    with pytest.raises(ModelFileError, match="does not fit"):
        adam.load_state_dict(sgd.state_dict())
    with pytest.raises(ModelFileError, match=r"'loss_scaler\.scale'"):
        make(scaler=LossScaler()).load_state_dict(adam.state_dict())


def test_loading_the_last_good_state_makes_it_healthy_again() -> None:
    o = make(halt=True)
    saved = o.state_dict()
    give(o, 0, math.nan)
    o.step()
    o.load_state_dict(saved)
    give(o, 0)
    o.step()
    assert figures(o)["count"] == 1.0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        make([ClipNorm(1.0), ClipNorm(2.0)])
    with pytest.raises(ValueError, match="different names"):
        make([])
    with pytest.raises(ValueError, match="accumulation"):
        make(accumulation=0)
    with pytest.raises(ValueError, match="nesterov"):
        SGDRule(nesterov=True)
    with pytest.raises(ValueError, match="optimizer: expected lr of at least 0 and below infinity, got -1"):
        AdamW([{"params": [tensor([1.0], requires_grad=True)], "lr": -1.0}], lr=0.1)
    with pytest.raises(ValueError, match="optimizer: expected weight_decay of at least 0 and below infinity, got nan"):
        AdamW([{"params": [tensor([1.0], requires_grad=True)], "weight_decay": math.nan}], lr=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClipNorm(-1.0), "clip_norm: expected max_norm of at least 0, got -1"),
        (lambda: ClipNorm(math.nan), "clip_norm: expected max_norm"),
        (lambda: ClipValue(-1.0), "clip_value: expected limit"),
        (lambda: GradientNoise(-1.0, seed=0), "gradient_noise: expected std"),
        (lambda: LossScaler(init=-1.0), "loss scaler: expected init above 0 and below infinity, got -1"),
        (lambda: LossScaler(minimum=0.0), "loss scaler: expected minimum above 0"),
        (lambda: LossScaler(interval=0), "loss scaler: expected interval of at least 1"),
        (lambda: LossScaler(backoff=0.0), "loss scaler: expected backoff above 0 and below 1, got 0"),
        (lambda: make(lr=math.inf), "optimizer: expected lr"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_bound_without_end_only_measures() -> None:
    ClipNorm(math.inf)
    ClipValue(math.inf)


@pytest.mark.parametrize("facade", [lambda ps: AdamW(ps, lr=0.1), lambda ps: SGD(ps, lr=0.1, momentum=0.9)])
def test_a_hand_written_loop_fits_a_line(facade: Callable[[list[Tensor]], Optimizer]) -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    w, b = tensor(0.0, requires_grad=True), tensor(0.0, requires_grad=True)
    optimizer = facade([w, b])
    for _ in range(200):
        loss = (tensor(x) * w + b - tensor(2 * x + 0.5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert w.item() == pytest.approx(2.0, abs=1e-2)
    assert b.item() == pytest.approx(0.5, abs=1e-2)


def test_facade_takes_names_and_groups() -> None:
    a, b, c = (tensor(np.ones(2), "float32", requires_grad=True) for _ in range(3))
    o = SGD(
        [{"params": [("a", a)], "lr": 0.4}, {"params": [("b", b)], "weight_decay": 1.0}, {"params": [c]}],
        lr=0.1,
    )
    o.arena.grads[...] = 1.0
    o.step()
    np.testing.assert_allclose([t.numpy()[0] for t in (a, b, c)], [0.6, 0.8, 0.9], rtol=1e-6)
    assert list(o.arena.parameters) == ["a", "b", "2"]
    with pytest.raises(TypeError, match="got 'betas'"):
        AdamW([{"params": [a], "betas": (0, 0)}])
    with pytest.raises(ValueError, match="at least one"):
        AdamW([])


def test_an_optimizer_shows_what_matters() -> None:
    p = tensor([1.0, 2.0, 3.0], requires_grad=True)
    shown = repr(optim.AdamW([p], lr=3e-4, weight_decay=0.1))
    assert shown.startswith("AdamW(\n  1 tensors, 3 values, cpu\n  lr=0.0003\n")
    assert "betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1" in shown
    schedule = optim.Schedule("cosine", total=9)
    whole = optim.Optimizer(
        optim.FlatParameters([p]), [optim.ClipNorm(1.0), optim.SGDRule()], lr=0.1, schedule=schedule, accumulation=4
    )
    whole.set("lr", 0.5)
    for part in ("lr=0.5", "Schedule(name='cosine', total=9", "accumulation=4", "ClipNorm(max_norm=1.0", "SGDRule("):
        assert part in repr(whole)
