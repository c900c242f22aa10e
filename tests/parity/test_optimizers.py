"""Every optimizer that a config can choose: twenty steps beside its published implementation, and continued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flame_train.config.training_sections import GradientSection, OptimizerSection, ScheduleSection, TrainSection
from flame_train.engine import Parameter, capture
from flame_train.engine.backend import get_backend
from flame_train.engine.optim import METRICS, Optimizer
from flame_train.engine.shape_run import shape_run
from flame_train.optimizers import OPTIMIZERS
from flame_train.run.train.step_state import build_optimizer

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SHAPES = [(4, 24), (40, 4), (4, 24), (17,), (64, 4)]
STEPS = 20


def published(module: str, name: str, **settings: Any) -> Callable[..., Any]:
    def make(parameters: list[Any], lr: float) -> Any:
        return getattr(pytest.importorskip(module), name)(parameters, lr=lr, **settings)

    return make


CASES: list[tuple[str, float, dict[str, Any], Callable[..., Any]]] = [
    ("adamw", 0.01, {"weight_decay": 0.1}, published("torch.optim", "AdamW", weight_decay=0.1)),
    (
        "sgd",
        0.01,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        published("torch.optim", "SGD", momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    ("lion", 0.01, {}, published("lion_pytorch", "Lion")),
    (
        "lion",
        0.01,
        {"betas": (0.95, 0.98), "weight_decay": 0.1},
        published("lion_pytorch", "Lion", betas=(0.95, 0.98), weight_decay=0.1),
    ),
    ("prodigy", 1.0, {}, published("prodigyopt", "Prodigy")),
    (
        "prodigy",
        1.0,
        {
            "d0": 1e-4,
            "d_coef": 2.0,
            "growth_rate": 1.02,
            "weight_decay": 0.01,
            "use_bias_correction": True,
            "safeguard_warmup": True,
            "betas": (0.9, 0.99),
        },
        published(
            "prodigyopt",
            "Prodigy",
            d0=1e-4,
            d_coef=2.0,
            growth_rate=1.02,
            weight_decay=0.01,
            use_bias_correction=True,
            safeguard_warmup=True,
            betas=(0.9, 0.99),
        ),
    ),
    ("schedule_free_adamw", 0.01, {}, published("schedulefree", "AdamWScheduleFree")),
    (
        "schedule_free_adamw",
        0.01,
        {"betas": (0.95, 0.99), "weight_decay": 0.1},
        published("schedulefree", "AdamWScheduleFree", betas=(0.95, 0.99), weight_decay=0.1),
    ),
    ("adafactor", 0.01, {}, published("transformers", "Adafactor", scale_parameter=False, relative_step=False)),
    (
        "adafactor",
        0.1,
        {"beta1": 0.9, "weight_decay": 0.1, "scale_parameter": True, "clip_threshold": 0.5},
        published("transformers", "Adafactor", relative_step=False, beta1=0.9, weight_decay=0.1, clip_threshold=0.5),
    ),
    (
        "adafactor",
        1.0,
        {"relative_step": True, "scale_parameter": True},
        lambda parameters, lr: published("transformers", "Adafactor", relative_step=True)(parameters, None),
    ),
    (
        "adafactor",
        1.0,
        {"relative_step": True, "warmup_init": True, "scale_parameter": True, "beta1": 0.9},
        lambda parameters, lr: published("transformers", "Adafactor", relative_step=True, warmup_init=True, beta1=0.9)(
            parameters, None
        ),
    ),
    (
        "adafactor",
        1.0,
        {"relative_step": True, "weight_decay": 0.1},
        lambda parameters, lr: published("transformers", "Adafactor", scale_parameter=False, weight_decay=0.1)(
            parameters, None
        ),
    ),
    ("came", 0.01, {}, published("pytorch_optimizer", "CAME")),
    (
        "came",
        0.01,
        {"came_betas": (0.8, 0.9, 0.99), "weight_decay": 0.1, "clip_threshold": 0.5},
        published("pytorch_optimizer", "CAME", betas=(0.8, 0.9, 0.99), weight_decay=0.1, clip_threshold=0.5),
    ),
    ("muon", 0.01, {}, published("torch.optim", "Muon", weight_decay=0.1, adjust_lr_fn="match_rms_adamw")),
    (
        "muon",
        0.01,
        {"momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "muon_scale": "original"},
        published("torch.optim", "Muon", weight_decay=0.0, momentum=0.8, nesterov=False, adjust_lr_fn="original"),
    ),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(CASES)]


def start(name: str = "") -> list[np.ndarray[Any, Any]]:
    """The first values; torch's Muon takes no vectors."""
    rng = np.random.default_rng(0)
    shapes = [shape for shape in SHAPES if name != "muon" or len(shape) > 1]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def gradient(step: int, which: int, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Towards a place of its own, with noise: so that there is something to find, and signs change."""
    rng = np.random.default_rng([step, which])
    return (values - 3.0 + rng.standard_normal(values.shape)).astype(np.float32)


def made(
    name: str, lr: float, keys: dict[str, Any], values: list[Any] | None = None, **schedule: Any
) -> tuple[list[Parameter], Optimizer]:
    parameters = [Parameter(w, f"p{i}") for i, w in enumerate(values or start())]
    sections = TrainSection(steps=STEPS, precision="fp32"), OptimizerSection(name=name, lr=lr, **keys)
    schedule = {"name": "constant", **schedule}
    optimizer = build_optimizer(
        parameters, *sections, ScheduleSection(**schedule), GradientSection(clip_norm=0.0), get_backend("cpu")
    )
    return parameters, optimizer


def trained(parameters: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(parameters):
            p.grad.data[...] = gradient(step, i, p.numpy())
        optimizer.step()


@pytest.mark.parametrize(("name", "lr", "keys", "reference"), CASES, ids=IDS)
def test_twenty_steps(
    name: str, lr: float, keys: dict[str, Any], reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, at every step, to a few units of what a step changes; and d where there is one.

    Muon's products, which PyTorch does in bfloat16, are done in fp32 on both sides.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.float().clone())
    parameters, optimizer = made(name, lr, keys, start(name))
    theirs = [torch.nn.Parameter(torch.tensor(w)) for w in start(name)]
    other = reference(theirs, lr)
    if hasattr(other, "train"):
        other.train()
    for step in range(STEPS):
        trained(parameters, optimizer, range(step, step + 1))
        for i, q in enumerate(theirs):
            q.grad = torch.tensor(gradient(step, i, q.detach().numpy()))
        other.step()
        for p, q in zip(parameters, theirs, strict=True):
            np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=2e-5, atol=2e-5, err_msg=f"step {step}")
    if name == "prodigy":
        d = optimizer.metric_values[optimizer.metric_names.index("d")]
        assert d == pytest.approx(other.param_groups[0]["d"], rel=1e-4)
        assert d > 2 * keys.get("d0", 1e-6) or "growth_rate" in keys, "it found a rate"
    if hasattr(other, "eval"):
        other.eval()
        with optimizer.averaged():
            for p, q in zip(parameters, theirs, strict=True):
                np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_to_the_bit(name: str) -> None:
    """With a warm-up, whose first rate is 0."""
    whole, optimizer = made(name, 0.01, {}, warmup_steps=3)
    trained(whole, optimizer, range(12))
    first, one = made(name, 0.01, {}, warmup_steps=3)
    trained(first, one, range(7))
    second, two = made(name, 0.01, {}, warmup_steps=3)
    two.arena.load_state(one.arena.state())
    two.load_state_dict(one.state_dict())
    trained(second, two, range(7, 12))
    for a, b in zip(whole, second, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        assert np.isfinite(a.numpy()).all()
    np.testing.assert_array_equal(optimizer.metric_values, two.metric_values)
    for start_, stop in optimizer.arena.padding:
        assert not optimizer.arena.values[start_:stop].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(name: str) -> None:
    parameters, optimizer = made(name, 0.01, {})
    trained(parameters, optimizer, range(3))
    values, state = optimizer.arena.state(), optimizer.state_dict()
    parameters[0].grad.data[...] = np.inf
    optimizer.step()
    for before, after in ((values, optimizer.arena.state()), (state, optimizer.state_dict())):
        for key in before.keys() - {"skipped"}:
            np.testing.assert_array_equal(before[key], after[key], err_msg=key)
    assert optimizer.metric_values[METRICS.index("skipped")] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_are_no_trouble(name: str) -> None:
    """As those of LoRA's down matrices in the first step, whose up matrices are zero."""
    parameters, optimizer = made(name, 0.01, {})
    for _ in range(3):
        for p in parameters:
            p.grad.data[...] = 0.0
        optimizer.step()
    assert all(np.isfinite(p.numpy()).all() for p in parameters)


PLUS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"d0": 1e-4, "d_coef": 2.0, "weight_decay": 0.1, "schedulefree_c": 8.0, "betas": (0.95, 0.98)},) * 2,
    ({"d_limiter": False, "factored": False, "d_coef": 0.1},) * 2,
    ({"factored": False, "use_stableadamw": False},) * 2,
]


@pytest.mark.parametrize("shapes", [SHAPES, [(40, 40), (32, 8, 3, 3), (64, 4, 1, 1)]], ids=["lora", "others"])
@pytest.mark.parametrize(("keys", "theirs"), PLUS)
def test_prodigy_schedule_free(keys: Any, theirs: Any, shapes: Any) -> None:
    """The published one is given fp64, so that it keeps in fp64 what d is estimated from.

    Given fp32 it rounds the first values to bf16, and takes their rounding for a distance that was gone.
    """
    values = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)]
    parameters, optimizer = made("prodigy_schedule_free", 1.0, keys, values)
    others = [torch.nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in values]
    other = published("prodigyplus", "ProdigyPlusScheduleFree", **theirs)(others, 1.0)
    for step in range(STEPS):
        trained(parameters, optimizer, range(step, step + 1))
        for i, q in enumerate(others):
            q.grad = torch.tensor(gradient(step, i, q.detach().numpy().astype(np.float32)), dtype=torch.float64)
        other.step()
        d = optimizer.metric_values[optimizer.metric_names.index("d")]
        assert d == pytest.approx(other.param_groups[0]["d"], rel=1e-4), f"step {step}"
        for p, q in zip(parameters, others, strict=True):
            np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=2e-5, atol=2e-5, err_msg=f"step {step}")
    assert d > 2 * keys.get("d0", 1e-6), "it found a rate"
    other.eval()
    with optimizer.averaged():
        for p, q in zip(parameters, others, strict=True):
            np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=2e-5, atol=2e-5)


class OwnRates:
    """ai-toolkit's Automagic in PyTorch and in other words; its module asks for optimum-quanto."""

    def __init__(self, parameters: list[Any], lr: float, bump: float, decay: float, least: float, most: float) -> None:
        self.parameters, self.bump, self.decay, self.bounds = parameters, bump, decay, (least, most)
        self.states = [
            {
                "codes": torch.full_like(p, 127.0),
                "scale": torch.tensor(lr) / 127,
                "above": torch.zeros_like(p).bool(),
                "row": torch.zeros(p.shape[:-1]),
                "col": torch.zeros(*p.shape[:-2], *p.shape[-1:]),
                "v": torch.zeros_like(p),
            }
            for p in parameters
        ]

    @torch.no_grad()
    def step(self) -> float:
        means = []
        for p, s in zip(self.parameters, self.states, strict=True):
            squares = p.grad**2 + 1e-30
            if p.ndim > 1:
                s["row"].lerp_(squares.mean(-1), 0.001)
                s["col"].lerp_(squares.mean(-2), 0.001)
                share = s["row"] / s["row"].mean(-1, keepdim=True)
                u = p.grad * torch.outer(share.rsqrt(), s["col"].rsqrt())
            else:
                s["v"].lerp_(squares, 0.001)
                u = p.grad * s["v"].rsqrt()
            u = u / max(float(u.norm() / u.numel() ** 0.5), 1.0)
            agree = s["above"] == (u > 0)
            rate = (s["codes"] * s["scale"] + torch.where(agree, self.bump, -self.bump)).clamp(*self.bounds)
            s["above"], s["scale"] = u > 0, rate.max() / 127
            s["codes"] = (rate / s["scale"]).round()
            p.mul_(1 - self.decay * rate).sub_(rate * u)
            means.append(float(rate.mean()))
        return float(np.mean(means))


@pytest.mark.parametrize(("bump", "decay", "most"), [(1e-6, 0.0, 1e-3), (1e-4, 0.1, 5e-4)])
def test_automagic_is_ai_toolkits(bump: float, decay: float, most: float) -> None:
    """A rate half way between two codes may fall to either, which moves its value by a 254th of the largest rate."""
    keys = {"lr_bump": bump, "weight_decay": decay, "start_lr": 1e-4, "largest_lr": most}
    values = start()
    parameters, optimizer = made("automagic", 1.0, keys, values)
    theirs = [torch.nn.Parameter(torch.tensor(w)) for w in values]
    other = OwnRates(theirs, 1e-4, bump, decay, 1e-7, most)
    for step in range(STEPS):
        trained(parameters, optimizer, range(step, step + 1))
        for i, q in enumerate(theirs):
            q.grad = torch.tensor(gradient(step, i, q.detach().numpy()))
        mean = other.step()
        assert optimizer.metric_values[optimizer.metric_names.index("avg_lr")] == pytest.approx(mean, rel=1e-3)
    moved = max(abs(p.numpy() - w).max() for p, w in zip(parameters, values, strict=True))
    far = np.concatenate([abs(p.numpy() - q.detach().numpy()).ravel() for p, q in zip(parameters, theirs, strict=True)])
    assert np.mean(far > 2e-6) < 0.01
    assert far.max() < 0.02 * moved


def test_lora_plus_is_a_higher_rate_for_the_up_matrices() -> None:
    weights = start()[:2]
    parameters = [Parameter(w, n) for w, n in zip(weights, ("a.lora_down.weight", "a.lora_up.weight"), strict=True)]
    optimizer = build_optimizer(
        parameters,
        TrainSection(precision="fp32"),
        OptimizerSection(lr=0.01, lora_plus_ratio=16.0),
        ScheduleSection(name="constant"),
        GradientSection(clip_norm=0.0),
        get_backend("cpu"),
        ".lora_up.weight",
    )
    theirs = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
    groups = [{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.16}]
    other = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
    for step in range(STEPS):
        trained(parameters, optimizer, range(step, step + 1))
        for i, q in enumerate(theirs):
            q.grad = torch.tensor(gradient(step, i, q.detach().numpy()))
        other.step()
    for p, q in zip(parameters, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=2e-5, atol=2e-5)


def in_8_bits(moment: Any, levels: Any) -> Any:
    """The nearest of bitsandbytes' levels, by trying all, in blocks of 256.

    Its own quantizer does so on a GPU alone. The one for CPUs looks small values up in a coarse table.
    """
    filled = torch.nn.functional.pad(moment.reshape(-1), (0, -moment.numel() % 256)).reshape(-1, 256)
    most = filled.abs().amax(1, keepdim=True)
    places = ((filled / most.clamp(min=1e-38))[..., None] - levels).abs().argmin(-1)
    return (levels[places] * most).reshape(-1)[: moment.numel()].reshape(moment.shape)


class BlockwiseAdamW:
    """bitsandbytes' AdamW8bit in its own words; its optimizer needs a GPU."""

    def __init__(self, parameters: list[Any], lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.parameters, self.lr, self.betas, self.eps, self.decay = parameters, lr, betas, eps, decay
        self.moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
        self.done = 0

    def step(self) -> None:
        functional = pytest.importorskip("bitsandbytes.functional")
        maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
        self.done += 1
        (b1, b2), t = self.betas, self.done
        for p, moments in zip(self.parameters, self.moments, strict=True):
            m = b1 * moments[0] + (1 - b1) * p.grad
            v = b2 * moments[1] + (1 - b2) * p.grad**2
            root = (1 - b2**t) ** 0.5
            with torch.no_grad():
                p.mul_(1 - self.lr * self.decay)
                p.add_(m / (v.sqrt() + self.eps * root), alpha=-self.lr * root / (1 - b1**t))
            for k, moment in enumerate((m, v)):
                moments[k] = in_8_bits(moment, maps[k])


def test_moments_of_8_bits_are_those_of_bitsandbytes() -> None:
    """A value half way between two levels may fall to either, and its parameter then moves apart by a little."""
    values = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(SHAPES)]
    parameters, optimizer = made("adamw8bit", 0.01, {"weight_decay": 0.1}, values)
    theirs = [torch.nn.Parameter(torch.tensor(w)) for w in values]
    other = BlockwiseAdamW(theirs, 0.01, (0.9, 0.999), 1e-8, 0.1)
    for step in range(STEPS):
        trained(parameters, optimizer, range(step, step + 1))
        for i, q in enumerate(theirs):
            q.grad = torch.tensor(gradient(step, i, q.detach().numpy()))
        other.step()
    far = np.concatenate([abs(p.numpy() - q.detach().numpy()).ravel() for p, q in zip(parameters, theirs, strict=True)])
    assert np.mean(far > 2e-5) < 0.005
    assert far.max() < 0.02


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_is_predicted_for_every_optimizer(name: str) -> None:
    """The step runs on shapes alone, as it is captured: nothing is read back, nothing is sent."""
    with shape_run() as run:
        before = run.live_bytes
        parameters = [Parameter(w, f"p{i}") for i, w in enumerate(start())]
        optimizer = build_optimizer(
            parameters,
            TrainSection(precision="fp32"),
            OptimizerSection(name=name),
            ScheduleSection(name="constant"),
            GradientSection(),
            run.backend,
        )
        step = capture(optimizer.step, "cuda")
        for _ in range(3):
            step()
        assert run.live_bytes - before >= 2 * 4 * optimizer.arena.size
