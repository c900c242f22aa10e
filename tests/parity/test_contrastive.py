"""Contrastive guidance beside two losses of others, which are written here with PyTorch as their sources have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flame_train.diffusion.contrast import NO_PROMPT, Contrast
from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import Parameter
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import float32
from flame_train.training.batch import EXTRA_CAPTION, Batch, HostBatch
from flame_train.training.step import Noised, losses_of

BATCH, SHAPE = 3, (4, 6, 2)


class Scaled:
    """A network of one number for each caption, of which the step trains them; it notes what it was told."""

    def __init__(self):
        self.factor = Parameter(np.array([[0.7, -0.2], [0.4, 0.9]], np.float32), "factor")
        self.told = []

    def denoise(self, x, t, cond, guidance=None):
        self.told.append(guidance)
        return x * (cond["text"] @ self.factor).reshape(-1, 1, 1, 2)

    def sample_latents(self, moments, noise):
        return moments[0] + (moments[1] * 0.5).exp() * noise


def batch_of(**more):
    draw = np.random.default_rng(4).standard_normal
    arrays = {"mean": draw((BATCH, *SHAPE)), "logvar": draw((BATCH, *SHAPE)) - 3, "text": draw((BATCH, 2))}
    arrays |= {f"{NO_PROMPT}{EXTRA_CAPTION}text": draw((BATCH, 2))} | more
    arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
    host = HostBatch(arrays, 7, np.arange(BATCH), ())
    batch = Batch(host, get_backend("cpu"), float32)
    batch.fill(host)
    return batch, arrays


OBJECTIVES = {
    "flow": FlowObjective,
    "epsilon": lambda: Objective(NoiseSchedule.scaled_linear()),
    "v": lambda: Objective(NoiseSchedule.scaled_linear(), "v"),
}


@pytest.mark.parametrize("by_level", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_the_loss_of_others(name, by_level):
    """diffusion-pipe's exactly; ai-toolkit's, which compares what is guided, is the square of the scale times it."""
    objective, denoiser, contrast = OBJECTIVES[name](), Scaled(), Contrast(2.0, 5.0, by_level)
    batch, arrays = batch_of()
    noised = Noised.of(denoiser, objective, float32, 3, batch)
    each = losses_of(noised, objective, contrast=contrast)
    each.mean().backward()
    assert [told is None for told in denoiser.told] == [False, False]
    scale = torch.from_numpy(denoiser.told[0].numpy())
    assert (denoiser.told[1].numpy() == scale.numpy()).all()
    levels = objective.levels(noised.t).numpy()
    drawn = (scale.numpy() - 1) / levels + 1 if by_level else scale.numpy()
    assert ((drawn >= 2) & (drawn < 5)).all()
    assert len(set(drawn.round(4).tolist())) == BATCH

    factor = torch.from_numpy(denoiser.factor.numpy()).requires_grad_()
    x, wanted = (
        torch.from_numpy(a.numpy()) for a in (noised.x, objective.target(noised.latents, noised.noise, noised.t))
    )
    with_prompt = x * (torch.from_numpy(arrays["text"]) @ factor)[:, None, None]
    empty = torch.from_numpy(arrays[f"{NO_PROMPT}{EXTRA_CAPTION}text"])
    without = (x * (empty @ factor)[:, None, None]).detach()
    s = scale[:, None, None, None]
    diffusion_pipe = ((with_prompt + (s - 1) * without) / s - wanted).square().mean((1, 2, 3))
    ai_toolkit = (with_prompt - (without + s * (wanted - without))).square().mean((1, 2, 3))
    np.testing.assert_allclose(each.numpy(), diffusion_pipe.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(each.numpy() * scale.numpy() ** 2, ai_toolkit.detach().numpy(), rtol=1e-5)
    diffusion_pipe.mean().backward()
    np.testing.assert_allclose(denoiser.factor.grad.numpy(), factor.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_sample_that_the_base_teaches_is_compared_as_it_is():
    """Its target is guided already. The others are compared as without it."""
    objective, contrast = FlowObjective(), Contrast(3.0, 3.0)
    taught = np.array([1, 0, 0], np.float32).reshape(-1, 1, 1, 1)
    mixed = losses_of(
        Noised.of(Scaled(), objective, float32, 3, batch_of(taught=taught)[0]), objective, contrast=contrast
    )
    plain = losses_of(Noised.of(Scaled(), objective, float32, 3, batch_of()[0]), objective, contrast=contrast)
    assert mixed.numpy()[0] == 0.0  # these adapters are never off
    np.testing.assert_array_equal(mixed.numpy()[1:], plain.numpy()[1:])
