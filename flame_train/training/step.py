"""A training step: device work only. Static shapes, fixed addresses, nothing read back to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flame_train.diffusion.objectives import Objective
from flame_train.engine import Tensor
from flame_train.engine.dtype import Array, DType
from flame_train.engine.optim import METRICS, Optimizer
from flame_train.engine.random import Rng

from .batch import Batch

POSTERIOR = 32
"""The stream of random numbers from which latents are drawn; the objective has streams of its own."""

Denoise = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(noised latents (B, H, W, Z) in the model's dtype, timesteps (B,), conditioning) -> prediction (B, H, W, Z)."""

SampleLatents = Callable[[tuple[Tensor, Tensor], Tensor], Tensor]
"""(mean and log variance, noise) -> latents in the scale that the denoiser sees, all fp32 (B, H, W, Z)."""

FIGURES = ("loss", *METRICS)
"""What `State.figures` holds after `update`, in order."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything a step works on. `loss` sums the micro-batches' losses; `figures` is what the log reads."""

    denoise: Denoise
    sample_latents: SampleLatents
    objective: Objective
    optimizer: Optimizer
    dtype: DType
    seed: int
    loss: Tensor
    figures: Array


def micro(s: State, batch: Batch) -> None:
    """One micro-batch: noise, forward, loss, backward. Gradients add up in the arena."""
    moments = batch.latents()
    xp, shape = moments[0].backend.xp, moments[0].shape[1:]
    rng = Rng(xp, s.seed, batch.step, batch.samples)
    latents = s.sample_latents(moments, Tensor(rng.normal(POSTERIOR, shape)))
    noise, t = s.objective.noise(rng, shape), s.objective.timesteps(rng)
    noised = s.objective.noised(latents, noise, t)
    prediction = s.denoise(noised.to(s.dtype), t, batch.conditioning())
    loss = s.objective.loss(prediction, latents, noise, t)
    (loss * s.optimizer.loss_scale).backward()
    s.loss.data[...] += loss.data


def update(s: State) -> None:
    """Unscale, clip, noise, schedule, optimizer, all or nothing; then the gradients and the loss start anew."""
    s.optimizer.step(s.loss)
    s.figures[0] = s.loss.data / s.optimizer.accumulation
    s.figures[1:] = s.optimizer.metrics()
    s.optimizer.zero_grad()
    s.loss.data[...] = 0.0
