"""A training step: device work only. Shapes are static and addresses fixed, and the host reads no value back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flame_train.adapters.dropping import Drops
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import Tensor, nn
from flame_train.engine.dtype import Array, DType
from flame_train.engine.optim import Optimizer
from flame_train.engine.random import Rng

from .batch import Batch
from .exchange import Exchanged

POSTERIOR = 32
"""The stream of random numbers for sampling latents; the objective has other streams."""


class Denoiser(Protocol):
    """The trained network: see `model.Denoiser`."""

    @property
    def network(self) -> nn.Module:
        """The network, whose adapters are trained."""

    def denoise(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], /) -> Tensor:
        """The prediction (B, H, W, Z) for noised latents (B, H, W, Z) in the model's dtype and timesteps (B,)."""

    def sample_latents(self, moments: tuple[Tensor, Tensor], noise: Tensor, /) -> Tensor:
        """Latents in the scale that the denoiser sees, of mean and log variance, and noise; all fp32 (B, H, W, Z)."""


class Objective(Protocol):
    """The objective: how latents are noised, and the loss of a prediction. All on the device."""

    def timesteps(self, rng: Rng, shape: Sequence[int]) -> Tensor:
        """(B,) positions in the schedule, for latents of `shape` (H, W, Z), as the denoiser gets them."""

    def noise(self, rng: Rng, latents: Tensor) -> Tensor:
        """(B, H, W, Z) fp32, the noise of the target, for latents of this shape."""

    def mixed(self, rng: Rng, noise: Tensor) -> Tensor:
        """The noise that is mixed into the latents."""

    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The denoiser's input."""

    def losses(
        self, prediction: Tensor, latents: Tensor, noise: Tensor, t: Tensor, factors: Tensor | None = None
    ) -> Tensor:
        """Each sample's loss; a step's loss is their mean.

        Args:
            prediction: the denoiser's prediction (B, H, W, Z).
            latents: the latents without noise (B, H, W, Z).
            noise: the noise of the target (B, H, W, Z).
            t: (B,) positions in the schedule.
            factors: fp32 (B, H, W, 1) or (B, 1, 1, 1), by which errors are multiplied; None: 1.

        Returns:
            (B,) fp32.
        """

    def at_levels(self, levels: Tensor) -> Tensor:
        """(B,) positions in the schedule of noise levels in (0, 1), fp32; 1 is pure noise."""

    def levels(self, t: Tensor) -> Tensor:
        """(B,) fp32, the noise levels of positions in the schedule."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything a step works on. `loss` sums the micro-batches' losses; the log reads `figures`.

    `figures` is fp64, as many as `figure_names`.
    """

    denoiser: Denoiser
    objective: Objective
    optimizer: Optimizer
    dtype: DType
    seed: int
    loss: Tensor
    figures: Array
    group: ProcessGroup = ALONE
    exchanged: Exchanged | None = None
    """What processes tell each other in each step; None for a process by itself."""
    sent: Array | None = None
    """A buffer for the gradients in the number format in which processes add them up; None: they are added in fp32."""
    drops: Drops = field(default_factory=Drops)
    limit: Callable[[], None] = lambda: None
    """Bounds the adapters' updates after each step of the optimizer."""

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The names of the metrics in `figures` after `update`, in order."""
        told = () if self.exchanged is None else self.exchanged.names
        return ("loss", *self.optimizer.metric_names, *told)


def micro(s: State, batch: Batch) -> None:
    """One micro-batch: noise, forward, loss, backward. Gradients add up in the arena."""
    with s.drops.during(Rng(s.loss.backend.xp, s.seed, batch.step, batch.samples)):
        each, t = batch_losses(s.denoiser, s.objective, s.dtype, s.seed, batch)
        loss = each.mean()
        (loss * s.optimizer.loss_scale).backward()
    s.loss.data[...] += loss.data
    if batch.told is not None:
        batch.told[0] = each.data
        batch.told[1] = s.objective.levels(t).data


def batch_losses(
    denoiser: Denoiser, objective: Objective, dtype: DType, seed: int, batch: Batch, times: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The losses of a batch.

    Args:
        denoiser: the network.
        objective: gives noise, timesteps and the loss.
        dtype: dtype of the network's input.
        seed: the run's seed; with the batch's step and samples it determines latents, noise and timesteps.
        batch: the batch on the device.
        times: positions in the schedule (B,); None: the objective draws them.

    Returns:
        Each sample's loss (B,), fp32, and its position in the schedule (B,).
    """
    moments = batch.latents()
    xp, shape = moments[0].backend.xp, moments[0].shape[1:]
    rng = Rng(xp, seed, batch.step, batch.samples)
    latents = denoiser.sample_latents(moments, Tensor(rng.normal(POSTERIOR, shape)))
    noise, t = objective.noise(rng, latents), objective.timesteps(rng, shape) if times is None else times
    noised = objective.noised(latents, objective.mixed(rng, noise), t)
    prediction = denoiser.denoise(noised.to(dtype), t, batch.conditioning())
    return objective.losses(prediction, latents, noise, t, batch.loss_weight()), t


def reduce(s: State) -> None:
    """Gradients and loss become sums over all processes; each learns what the others tell. Alone it does nothing."""
    if s.exchanged is None:
        return
    grads = s.optimizer.arena.grads
    if s.sent is None:
        s.group.all_reduce(grads)
    else:
        s.sent[...] = grads
        s.group.all_reduce(s.sent)
        grads[...] = s.sent
    s.exchanged.reduce(s.group, s.loss.data)


def update(s: State) -> None:
    """Unscale, clip, noise, schedule, optimizer, all or none; then the gradients and the loss are zeroed."""
    s.optimizer.step(s.loss)
    s.limit()
    s.figures[0] = s.loss.data / s.optimizer.accumulation
    metrics = s.optimizer.metric_values
    s.figures[1 : 1 + metrics.size] = metrics
    if s.exchanged is not None:
        s.figures[1 + metrics.size :] = s.exchanged.told
    s.optimizer.zero_grad()
    s.loss.data[...] = 0.0
