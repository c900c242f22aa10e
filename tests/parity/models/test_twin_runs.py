"""Steps of a small SDXL here and in PyTorch: the same weights, data and noise give the same losses and LoRA."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.config.load import from_options
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng
from flame_train.models.sdxl.unet import UNet
from flame_train.run.train.step_state import build_optimizer
from tests.parity.test_optimizers import published
from tests.parity.twins import sdxl

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 50
RUNS = {
    "adamw": (1e-3, {}, published("torch.optim", "AdamW", weight_decay=0.01)),
    # With a d_coef of 1 the loss leaps at step 30, and what is rounding becomes another run.
    "prodigy": (1.0, {"d_coef": 0.25}, published("prodigyopt", "Prodigy", d_coef=0.25)),
    "adafactor": (1e-3, {}, published("transformers", "Adafactor", scale_parameter=False, relative_step=False)),
    "lion": (1e-4, {}, published("lion_pytorch", "Lion")),
    "schedule_free_adamw": (1e-3, {}, published("schedulefree", "AdamWScheduleFree")),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices are so small that PyTorch's threads would wait for one another most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROOFS = [pytest.param(name, STEPS, marks=pytest.mark.proof) for name in RUNS]
"""A quarter of a minute each; tests/parity/test_optimizers.py has the rules."""


@pytest.mark.parametrize(("name", "steps"), [("adamw", 16), *PROOFS])
def test_losses_and_weights_are_those_of_pytorch(name, steps, fill, scrambled):
    """What changed in the weights is compared. PyTorch's network is in fp64, its LoRA and optimizer in fp32.

    In another precision Prodigy's first steps, a millionth of the weights, would be another run.
    """
    lr, keys, reference = RUNS[name]
    model = scrambled(UNet(sdxl.ARCH), "float32")
    twin = fill(model, sdxl.reference(sdxl.ARCH), sdxl.TO_DIFFUSERS)
    twin.requires_grad_(False)
    sdxl.patch(twin, sdxl.ARCH)
    attached = attach(model, resolve(model, ["attention"], UNET_PRESETS), rank=4, alpha=4.0, seed=5)
    leaves = {
        n: tuple(torch.from_numpy(p.numpy().copy()).requires_grad_() for p in (a.down, a.up))
        for n, a in attached.adapters.items()
    }
    config = from_options(
        train={"precision": "fp32", "steps": steps},
        optimizer={"name": name, "lr": lr, **keys},
        schedule={"name": "constant"},
        gradient={"clip_norm": 0.0},
    )
    optimizer = build_optimizer(
        attached.parameters(), config.train, config.optimizer, config.schedule, config.gradient, get_backend("cpu")
    )
    other = reference([p for pair in leaves.values() for p in pair], lr)
    if hasattr(other, "train"):
        other.train()
    there = dict(twin.named_parameters())
    bases = {name: (key, there[key]) for name, key in names_there(leaves).items()}
    first = {n: (a.down.numpy().copy(), a.up.numpy().copy()) for n, a in attached.adapters.items()}
    objective = Objective(NoiseSchedule.scaled_linear())
    for step in range(steps):
        batch, noise, latents, t = drawn(objective, step)
        optimizer.zero_grad()
        loss = objective.losses(sdxl.ours(model, batch), latents, noise, t).mean()
        loss.backward()
        optimizer.step()

        other.zero_grad()
        predicted = sdxl.theirs(twin, batch, weights_of(bases, leaves))
        expected = torch.nn.functional.mse_loss(predicted, sdxl.fp64(noise.numpy()))
        expected.backward()
        other.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), f"step {step}"
    if hasattr(other, "eval"):
        other.eval()
    with optimizer.averaged():
        for side in range(2):
            found = {n: (a.down.numpy(), a.up.numpy())[side] - first[n][side] for n, a in attached.adapters.items()}
            wanted = {n: pair[side].detach().numpy() - first[n][side] for n, pair in leaves.items()}
            size = np.sqrt(sum(np.square(w).sum() for w in wanted.values()))
            far = np.sqrt(sum(np.square(found[n] - w).sum() for n, w in wanted.items()))
            assert far < 1e-3 * size, ("down", "up")[side]


def drawn(objective, step):
    """A step's batch with the latents noised, the noise, the latents themselves and the timesteps."""
    rng = np.random.default_rng(step % 5)  # five images, which come again
    latents = Tensor(rng.standard_normal((2, 8, 8, 4)).astype(np.float32))
    draws = Rng(np, 9, np.asarray(step), np.arange(2))
    noise, t = objective.noise(draws, latents), objective.timesteps(draws)
    batch = {
        "latents": objective.noised(latents, noise, t).numpy(),
        "timesteps": t.numpy().astype(np.float32),
        "context": rng.standard_normal((2, 7, 24)).astype(np.float32),
        "pooled": rng.standard_normal((2, 20)).astype(np.float32),
        "time_ids": np.array([[64, 64, 0, 0, 64, 64]] * 2, np.float32),
    }
    return batch, noise, latents, t


def names_there(leaves):
    """The twin's names of the adapted weights."""
    return {name: next(iter(sdxl.TO_DIFFUSERS.pull([f"{name}.weight"]).sources)) for name in leaves}


def weights_of(bases, leaves):
    """The twin's weights with the updates of the LoRA's leaves, rank and alpha being the same."""
    made = {}
    for name, (key, base) in bases.items():
        down, up = leaves[name]
        made[key] = base + up.double() @ down.double()
    return made
