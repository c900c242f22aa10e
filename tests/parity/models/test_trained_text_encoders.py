"""Text encoders trained with the denoiser, beside transformers' with PEFT's LoRAs: gradients, and fifty steps."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.config.load import from_options
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import Parameter, Tensor, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng
from flame_train.run.train.step_state import build_optimizer
from tests.parity.models.test_t5 import norms_in_fp64
from tests.parity.models.test_twin_runs import one_thread
from tests.parity.twins import flux

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")
twins = pytest.importorskip("tests.parity.models.text_twins")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
exact = norms_in_fp64, one_thread
positions_in_fp64 = pytest.fixture(autouse=True)(flux.exact)

RATE, STEPS = 1e-3, 50


@pytest.fixture
def with_lora(dtype):
    """Puts a LoRA whose up is not zero on the named layers, in the precision of the test."""

    def put(networks, names):
        made = attach(
            networks,
            names,
            rank=twins.RANK,
            alpha=twins.ALPHA,
            seed=5,
            make_parameter=lambda name, values, device: Parameter(values.astype(dtype), name),
        )
        rng = np.random.default_rng(6)
        for adapter in made.adapters.values():
            adapter.up.data[...] = 0.06 * rng.standard_normal(adapter.up.shape)
        return made

    return put


@pytest.mark.parametrize("family", twins.KEYS)
def test_prediction_and_every_gradient(family, dtype, bound, off, fill, scrambled, with_lora):
    pair = twins.Twins(family, fill, scrambled, with_lora, dtype)
    rng = np.random.default_rng(2)
    latents = rng.standard_normal((2, 8, 8, twins.CHANNELS[family])).astype(dtype)
    weight = rng.standard_normal(latents.shape).astype(dtype)
    t = np.array([3.0, 871.0] if family in ("sdxl", "sd15") else [0.125, 0.875], np.float32)
    arrays = pair.arrays()

    mine, other = pair.ours(latents, t, arrays), pair.theirs(latents, t, arrays)
    assert off(mine, other.detach()) < 2 * bound
    (mine * tensor(weight)).sum().backward()
    (other * torch.from_numpy(weight.astype(np.float64))).sum().backward()
    layers = {name.partition(".")[0] for name in pair.attached.adapters}
    assert set(twins.KEYS[family]) <= layers
    for p, q in pair.pairs:
        assert off(p.grad, q.grad) < 20 * bound, p.name


@pytest.mark.proof
@pytest.mark.slow
def test_fifty_steps_with_both_clips(fill, scrambled):
    """Losses within 1e-4, and what changed in the weights within 1e-3; PyTorch computes in fp64."""

    def fresh(networks, names):
        return attach(networks, names, rank=twins.RANK, alpha=twins.ALPHA, seed=5)

    pair = twins.Twins("sdxl", fill, scrambled, fresh)
    first = [p.numpy().copy() for p, _ in pair.pairs]
    config = from_options(
        train={"precision": "fp32", "steps": STEPS},
        optimizer={"name": "adamw", "lr": RATE},
        schedule={"name": "constant"},
        gradient={"clip_norm": 0.0},
    )
    optimizer = build_optimizer(
        pair.attached.parameters(), config.train, config.optimizer, config.schedule, config.gradient, get_backend("cpu")
    )
    other = torch.optim.AdamW([q for _, q in pair.pairs], RATE, weight_decay=config.optimizer.weight_decay)
    objective = Objective(NoiseSchedule.scaled_linear())
    for step in range(STEPS):
        rng = np.random.default_rng(step % 5)  # five images, which come again
        latents = Tensor(rng.standard_normal((2, 8, 8, 4)).astype(np.float32))
        draws = Rng(np, 9, np.asarray(step), np.arange(2))
        noise, t = objective.noise(draws, latents), objective.timesteps(draws, latents.shape[1:])
        noised, times = objective.noised(latents, noise, t).numpy(), t.numpy().astype(np.float32)
        arrays = pair.arrays()
        optimizer.zero_grad()
        loss = objective.losses(pair.ours(noised, times, arrays), latents, noise, t).mean()
        loss.backward()
        optimizer.step()

        other.zero_grad()
        wanted = torch.from_numpy(noise.numpy().astype(np.float64))
        expected = torch.nn.functional.mse_loss(pair.theirs(noised, times, arrays), wanted)
        expected.backward()
        other.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), f"step {step}"
    for part in ("", *twins.KEYS["sdxl"]):
        rows = [i for i, (p, _) in enumerate(pair.pairs) if p.name.startswith(part)]
        wanted = [pair.pairs[i][1].detach().numpy() - first[i] for i in rows]
        found = [pair.pairs[i][0].numpy() - first[i] for i in rows]
        size = np.sqrt(sum(np.square(w).sum() for w in wanted))
        far = np.sqrt(sum(np.square(f - w).sum() for f, w in zip(found, wanted, strict=True)))
        assert 0 < far < 1e-3 * size, part
