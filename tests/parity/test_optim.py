"""Optimizers, schedules, loss scaling and clipping against torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flame_train.engine import Parameter, Tensor, tensor
from flame_train.engine.optim import (
    EMA,
    METRICS,
    SGD,
    AdamW,
    AdamWRule,
    ClipNorm,
    FlatParameters,
    LossScaler,
    Optimizer,
    Schedule,
    SGDRule,
    clip_grad_norm_,
    clip_grad_value_,
)
from flame_train.schedules.inverse_sqrt import InverseSqrt
from flame_train.schedules.rex import Rex
from flame_train.schedules.warmup_stable_decay import WarmupStableDecay

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SHAPES = [(17, 3), (64,), ()]
STEPS = 50

RULES: list[tuple[type[Any], str, dict[str, Any]]] = [
    (AdamW, "AdamW", {}),
    (AdamW, "AdamW", {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.2}),
    (AdamW, "AdamW", {"lr": 0.01, "weight_decay": 0.0}),
    (SGD, "SGD", {"lr": 0.1}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}),
]


def start(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(s), np.float32) for s in SHAPES]


def trained(make: Callable[[list[Any]], Any], leaf: Callable[[np.ndarray], Any], dtype: Any) -> np.ndarray:
    """The values after 50 steps on seeded gradients, from the library whose `leaf` and `make` are given."""
    params = [leaf(w.astype(dtype)) for w in start()]
    optimizer = make(params)
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        for p in params:
            g = np.asarray(rng.standard_normal(tuple(p.shape)), np.float32).astype(dtype)
            p.grad = tensor(g) if isinstance(p, Tensor) else torch.tensor(g)
        optimizer.step()
    read = [p.numpy() if isinstance(p, Tensor) else p.detach().numpy() for p in params]
    return np.concatenate([r.ravel() for r in read]).astype(np.float64)


@pytest.mark.parametrize(("ours", "theirs", "settings"), RULES)
def test_fifty_steps(ours: type[Any], theirs: str, settings: dict[str, Any]) -> None:
    """Against torch in fp64: at most twice the error of torch in fp32, plus one ulp."""
    reference = getattr(torch.optim, theirs)

    def torch_leaf(a: np.ndarray) -> Any:
        return torch.tensor(a, requires_grad=True)

    exact = trained(lambda ps: reference(ps, **settings), torch_leaf, np.float64)
    single = trained(lambda ps: reference(ps, **settings), torch_leaf, np.float32)
    mine = trained(lambda ps: ours(ps, **settings), lambda a: tensor(a, requires_grad=True), np.float32)
    allowed = 2 * np.abs(single - exact).max() + np.spacing(np.abs(exact).max().astype(np.float32))
    assert np.abs(mine - exact).max() <= allowed
    np.testing.assert_allclose(mine, single, rtol=1e-5, atol=1e-5)


def test_groups_follow_torch() -> None:
    def groups(ps: list[Any]) -> list[dict[str, Any]]:
        return [{"params": ps[:1], "lr": 0.01}, {"params": ps[1], "weight_decay": 0.3}, {"params": ps[2:]}]

    theirs = trained(
        lambda ps: torch.optim.AdamW(groups(ps)), lambda a: torch.tensor(a, requires_grad=True), np.float64
    )
    mine = trained(lambda ps: AdamW(groups(ps)), lambda a: tensor(a, requires_grad=True), np.float32)
    np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


def schedule_cases() -> list[Any]:
    from transformers import optimization as t

    w, n = 7, 60
    return [
        pytest.param(Schedule("constant"), lambda o: t.get_constant_schedule(o), id="constant"),
        pytest.param(
            Schedule("constant", warmup=w),
            lambda o: t.get_constant_schedule_with_warmup(o, w),
            id="constant+warmup",
        ),
        pytest.param(Schedule("linear", n, w), lambda o: t.get_linear_schedule_with_warmup(o, w, n), id="linear"),
        pytest.param(Schedule("cosine", n, w), lambda o: t.get_cosine_schedule_with_warmup(o, w, n), id="cosine"),
        pytest.param(
            Schedule("cosine", n, w, min_lr=2e-4),
            lambda o: t.get_cosine_with_min_lr_schedule_with_warmup(o, w, n, min_lr=2e-4),
            id="cosine+min",
        ),
        pytest.param(
            Schedule("cosine_restarts", n, w, cycles=3),
            lambda o: t.get_cosine_with_hard_restarts_schedule_with_warmup(o, w, n, num_cycles=3),
            id="restarts",
        ),
        pytest.param(
            Schedule("polynomial", n, w, power=2.5, min_lr=1e-5),
            lambda o: t.get_polynomial_decay_schedule_with_warmup(o, w, n, lr_end=1e-5, power=2.5),
            id="polynomial",
        ),
        pytest.param(
            InverseSqrt().build(n, w, 0.0), lambda o: t.get_inverse_sqrt_schedule(o, w), id="inverse square root"
        ),
        pytest.param(
            InverseSqrt().build(n, 0, 0.0), lambda o: t.get_inverse_sqrt_schedule(o, 0), id="without a warm-up"
        ),
        pytest.param(
            InverseSqrt(timescale=20).build(n, w, 0.0),
            lambda o: t.get_inverse_sqrt_schedule(o, w, 20),
            id="timescale",
        ),
        *(
            pytest.param(
                WarmupStableDecay(decay=0.3, decay_shape=shape).build(n, warmup, low * 1e-3),
                lambda o, shape=shape, warmup=warmup, low=low: t.get_wsd_schedule(
                    o, warmup, 18, n, decay_type=shape, min_lr_ratio=low
                ),
                id=f"warmup-stable-decay, {shape}, {warmup}",
            )
            for shape in ("cosine", "linear", "1-sqrt")
            for warmup, low in ((w, 0.0), (0, 0.2))  # there a warm-up begins at the least rate, here at 0
        ),
        pytest.param(
            Schedule("cosine", n, min_lr=1e-4),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, n, eta_min=1e-4),
            id="annealing",
        ),
        pytest.param(
            Schedule("polynomial", n, power=0.7),
            lambda o: torch.optim.lr_scheduler.PolynomialLR(o, n, 0.7),
            id="torch polynomial",
        ),
    ]


@pytest.mark.filterwarnings("ignore")
def test_schedules() -> None:
    pytest.importorskip("transformers")
    for case in schedule_cases():
        schedule, theirs = case.values
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
        scheduler = theirs(optimizer)
        for k in range(61):
            mine = float(schedule.rate(np, np.asarray(k), np.asarray(1e-3)))
            assert mine == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15), (case.id, k)
            optimizer.step()
            scheduler.step()


def test_rex() -> None:
    """As pytorch-optimizer, which has the paper's d of 1/2 and does its first step when it is made."""
    schedulers = pytest.importorskip("pytorch_optimizer.lr_scheduler")
    theirs = schedulers.REXScheduler(torch.optim.SGD([torch.zeros(1)], lr=1e-3), 60, max_lr=1e-3, min_lr=1e-5)
    schedule = Rex().build(60, 0, 1e-5)
    for k in range(63):
        mine = float(schedule.rate(np, np.asarray(k), np.asarray(1e-3)))
        assert mine == pytest.approx(theirs.get_lr(), rel=1e-9), k
        theirs.step()


@pytest.mark.parametrize("planted", [{3}, {0, 1, 2, 9}, {5, 11, 12}, set()])
def test_loss_scale_follows_grad_scaler(planted: set[int]) -> None:
    """The same scales, values and skips as torch.amp.GradScaler on planted overflows."""
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    w = torch.ones(4, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    p = Parameter(np.ones(4, np.float32), "w")
    mine = Optimizer(FlatParameters([p]), [SGDRule(0.9)], lr=0.1, scaler=LossScaler(interval=3))
    for i in range(16):
        assert mine.loss_scale.item() == theirs.get_scale()
        bad = math.inf if i in planted else 1.0
        sgd.zero_grad()
        theirs.scale((w * torch.arange(4.0) * bad).sum()).backward()
        theirs.step(sgd)
        theirs.update()
        mine.zero_grad()
        p.grad.data[...] = np.arange(4, dtype=np.float32) * mine.loss_scale.numpy()
        if i in planted:
            p.grad.data[2] = bad
        mine.step()
        np.testing.assert_allclose(p.numpy(), w.detach().numpy(), rtol=1e-6)
    assert mine.metric_values[METRICS.index("skipped")] == len(planted)


@pytest.mark.parametrize("scaler", [None, LossScaler(init=2.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_left_out_and_the_next_are_taken(scaler: LossScaler | None, bad: float) -> None:
    """As torch.amp.GradScaler leaves them out, however many there are; without a scaler PyTorch would write NaN."""
    scale = torch.amp.GradScaler("cpu", init_scale=2.0)
    theirs = [torch.tensor(w, requires_grad=True) for w in start()]
    mine = [tensor(w, requires_grad=True) for w in start()]
    adam = torch.optim.AdamW(theirs, lr=0.1)
    made = Optimizer(FlatParameters(mine), [AdamWRule()], lr=0.1, scaler=scaler) if scaler else AdamW(mine, lr=0.1)
    for i in range(12):
        factor = bad if i in {2, 3, 4, 5, 8} else 1.0
        adam.zero_grad()
        scale.scale(sum((p * p * factor).sum() for p in theirs)).backward()
        scale.step(adam)
        scale.update()
        made.zero_grad()
        total = sum((p * p * factor).sum() for p in mine)
        (total * made.loss_scale).backward()
        made.step()
    for p, q in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-5, atol=1e-6)
    figures = dict(zip(METRICS, made.metric_values.tolist(), strict=True))
    assert (figures["skipped"], figures["count"], figures["healthy"]) == (5, 7, 1)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clip_grad_norm(max_norm: float, norm_type: float) -> None:
    theirs, mine = both()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert clip_grad_norm_(mine, max_norm, norm_type).item() == pytest.approx(expected.item(), rel=1e-6)
    same(mine, theirs)


def test_clip_grad_value() -> None:
    theirs, mine = both()
    torch.nn.utils.clip_grad_value_(theirs, 0.3)
    clip_grad_value_(mine, 0.3)
    same(mine, theirs)


def test_clip_norm_in_the_chain() -> None:
    theirs, mine = both()
    arena = FlatParameters(mine)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    Optimizer(arena, [ClipNorm(0.5), SGDRule()], lr=0.0).step()
    same(mine, theirs)


def both() -> tuple[list[Any], list[Tensor]]:
    theirs, mine = [], []
    for w, g in zip(start(), start(5), strict=True):
        theirs.append(torch.tensor(w, requires_grad=True))
        theirs[-1].grad = torch.tensor(g)
        mine.append(tensor(w, requires_grad=True))
        mine[-1].grad = tensor(g)
    return theirs, mine


def same(mine: list[Tensor], theirs: list[Any]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decay", [0.15, 0.999])
def test_the_moving_average_is_that_of_diffusers(decay: float) -> None:
    """`EMAModel`, whose decay begins at 0 and rises to what is asked for."""
    ema = pytest.importorskip("diffusers.training_utils").EMAModel
    theirs = [torch.nn.Parameter(torch.tensor(w)) for w in start()]
    shadow = ema(theirs, decay=decay)
    mine = [tensor(w, requires_grad=True) for w in start()]
    optimizer = Optimizer(FlatParameters(mine), [SGDRule()], lr=0.1, average=EMA(decay))
    rng = np.random.default_rng(3)
    for _ in range(STEPS):
        for p in mine:
            p.grad = tensor(np.asarray(rng.standard_normal(p.shape), np.float32))
        optimizer.step()
        for t, p in zip(theirs, mine, strict=True):
            t.data.copy_(torch.tensor(p.numpy()))
        shadow.step(theirs)
    with optimizer.averaged():
        for t, p in zip(shadow.shadow_params, mine, strict=True):
            np.testing.assert_allclose(p.numpy(), t.numpy(), rtol=1e-6, atol=1e-6)


CLIPPED: dict[str, list[tuple[Any, Any]]] = {  # by name: each gradient's values and dtype
    "wide range": [([1 / 3, 1e-50, 1e60], np.float64), ([2.0, -1e59], np.float64)],
    "fp64": [([1 / 3, -2.0], np.float64), ([0.0, 0.1], np.float64)],
    "mixed": [([3.0, -4.0], np.float64), ([0.5, 0.25], np.float32)],
    "zeros": [([0.0, 0.0], np.float32), ([0.0, 3.0], np.float32)],
    "half": [([300.0, -400.0], np.float16), ([0.5, 0.25], np.float16)],
}


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("norm_type", [2.0, 1, 0.0, 0, 3.0, math.inf, "inf", -math.inf, -1.0])
def test_clip_grad_norm_in_every_dtype_and_norm(name: str, norm_type: Any) -> None:
    theirs, mine = [], []
    for values, dtype in CLIPPED[name]:
        g = np.asarray(values, dtype)
        theirs.append(torch.tensor(g, requires_grad=True))
        theirs[-1].grad = torch.tensor(g)
        mine.append(tensor(g, requires_grad=True))
        mine[-1].grad = tensor(g)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    found = clip_grad_norm_(mine, 0.5, norm_type)
    rtol = {np.float64: 1e-12, np.float32: 1e-6, np.float16: 2e-3}[CLIPPED[name][0][1]]
    rtol = 1e-6 if name == "mixed" else rtol
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rtol)
    assert found.dtype == (np.float64 if np.float64 in [d for _, d in CLIPPED[name]] else np.float32)
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad.dtype == b.grad.numpy().dtype
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=rtol, atol=0)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": -1.0}),
    ("AdamW", {"lr": math.nan}),
    ("AdamW", {"betas": (1.0, 0.9)}),
    ("AdamW", {"betas": (0.9, 2.0)}),
    ("AdamW", {"betas": (-0.1, 0.9)}),
    ("AdamW", {"eps": -1e-8}),
    ("AdamW", {"eps": math.nan}),
    ("AdamW", {"weight_decay": -0.1}),
    ("SGD", {"lr": -1.0}),
    ("SGD", {"momentum": -0.5}),
    ("SGD", {"weight_decay": -0.1}),
]


@pytest.mark.parametrize(("name", "settings"), BAD)
def test_numbers_that_torch_refuses_are_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        getattr(torch.optim, name)([torch.ones(1, requires_grad=True)], **settings)
    what = "beta" if "betas" in settings else next(iter(settings))
    with pytest.raises(ValueError, match=f"expected {what}"):
        {"AdamW": AdamW, "SGD": SGD}[name]([tensor([1.0], requires_grad=True)], **settings)


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"growth": 0.5}, {"growth_factor": 0.5}),
        ({"growth": 1.0}, {"growth_factor": 1.0}),
        ({"backoff": 2.0}, {"backoff_factor": 2.0}),
        ({"backoff": 1.0}, {"backoff_factor": 1.0}),
    ],
)
def test_scalers_that_torch_refuses_are_refused(settings: dict[str, float], theirs: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        torch.amp.GradScaler("cpu", **theirs)
    with pytest.raises(ValueError, match=f"loss scaler: expected {next(iter(settings))}"):
        LossScaler(**settings)
