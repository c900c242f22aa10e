"""A training step: device work only. Shapes are static and addresses fixed, and the host reads no value back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from flame_train.adapters.dropping import Drops
from flame_train.diffusion.contrast import NO_PROMPT, Contrast
from flame_train.diffusion.objective_kind import ObjectiveKind
from flame_train.diffusion.objectives import TrainingObjective
from flame_train.diffusion.preservation import Preservation
from flame_train.diffusion.preservation.off import Off
from flame_train.diffusion.random_streams import Stream
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import Tensor, nn, no_grad
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import Array, DType
from flame_train.engine.optim import Optimizer
from flame_train.engine.random import Rng
from flame_train.errors import ConfigError, kind_of

from .batch import Batch

_FURTHER = np.int64(1 << 31)
"""Added to the numbers of samples for the adapters' dropout in a second pass: batches have fewer samples."""

POSTERIOR = 32
"""The stream of random numbers for sampling latents; the objective has other streams."""


class Denoiser(Protocol):
    """The trained network: see `model.Denoiser`."""

    @property
    def network(self) -> nn.Module:
        """The network, whose adapters are trained."""

    def denoise(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor | None = None, /) -> Tensor:
        """Gives the prediction (B, H, W, Z) for noised latents (B, H, W, Z) in the model's dtype and timesteps (B,).

        `guidance` (B,) is what a network with such an input is told; None: what it is always told.
        """

    def sample_latents(self, moments: tuple[Tensor, Tensor], noise: Tensor, /) -> Tensor:
        """Samples latents in the denoiser's scale, of mean and log variance, and noise; all fp32 (B, H, W, Z)."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything a step works on. `loss` sums the micro-batches' losses; the log reads `figures`.

    `figures` is fp64, as many as `figure_names`.
    """

    denoiser: Denoiser
    objective: TrainingObjective
    optimizer: Optimizer
    dtype: DType
    seed: int
    loss: Tensor
    figures: Array
    group: ProcessGroup = ALONE
    exchanged: SharedVector | None = None
    """What processes tell each other in each step; None for a process by itself."""
    sent: Array | None = None
    """A buffer for the gradients in the number format in which processes add them up; None: they are added in fp32."""
    drops: Drops = field(default_factory=Drops)
    limit: Callable[[], None] = lambda: None
    """Bounds the adapters' updates after each step of the optimizer."""
    off: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the network computes without its adapters."""
    contrast: Contrast | None = None
    """Contrastive guidance; None: predictions are compared as they are."""
    own: ObjectiveKind | None = None
    """A registered objective that makes the loss; None: `objective` does."""
    preservation: Preservation = field(default_factory=Off)
    """What a micro-batch trains beside the loss of its images, or in its place."""
    preservation_weight: float = 1.0
    """The factor on the loss of `preservation`."""

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The names of the metrics in `figures` after `update`, in order."""
        shared = () if self.exchanged is None else self.exchanged.names
        return ("loss", *self.optimizer.metric_names, *shared)


@dataclass(frozen=True, slots=True)
class Noised:
    """A micro-batch with its noise: what predictions are asked for."""

    denoiser: Denoiser
    batch: Batch
    rng: Rng
    latents: Tensor
    noise: Tensor
    t: Tensor
    x: Tensor
    """The denoiser's input, in its dtype."""

    @classmethod
    def of(
        cls,
        denoiser: Denoiser,
        objective: TrainingObjective,
        dtype: DType,
        seed: int,
        batch: Batch,
        times: Tensor | None = None,
    ) -> Noised:
        """Returns the micro-batch with noise drawn: the latents without noise and with it.

        Args:
            seed: the run's seed; with the batch's step and samples it determines latents, noise and timesteps.
            times: positions in the schedule (B,); None: the objective draws them.
        """
        moments = batch.latents()
        xp, shape = moments[0].backend.xp, moments[0].shape[1:]
        rng = Rng(xp, seed, batch.step, batch.samples)
        latents = denoiser.sample_latents(moments, Tensor(rng.normal(POSTERIOR, shape)))
        noise, t = objective.noise(rng, latents), objective.timesteps(rng, shape) if times is None else times
        noised = objective.noised(latents, objective.mixed(rng, noise), t)
        return cls(denoiser, batch, rng, latents, noise, t, noised.to(dtype))

    def prediction(self, text: str = "", guidance: Tensor | None = None) -> Tensor:
        """Returns the denoiser's prediction for the own captions, or for further ones."""
        return self.denoiser.denoise(self.x, self.t, self.batch.conditioning(text), guidance)


@dataclass(frozen=True, slots=True)
class _Predictions:
    """The predictions that a preservation asks for; see `diffusion.preservation.Predictions`."""

    noised: Noised
    off: Callable[[], AbstractContextManager[None]]
    strength: Tensor

    def trained(self, text: str) -> Tensor:
        return self.noised.prediction(text).float()

    def base(self, text: str) -> Tensor:
        return base_prediction(self.noised, self.off, text)


def base_prediction(noised: Noised, off: Callable[[], AbstractContextManager[None]], text: str = "") -> Tensor:
    """Returns the base model's prediction, fp32: of the same network with its adapters off, without a gradient."""
    with no_grad(), off():
        return noised.prediction(text).float()


def micro(s: State, batch: Batch) -> None:
    """Runs one micro-batch: noise, forward, loss, backward. Gradients add up in the arena."""
    noised = Noised.of(s.denoiser, s.objective, s.dtype, s.seed, batch)
    each, levels = None, s.objective.levels(noised.t)
    if not s.preservation.instead:
        with s.drops.during(noised.rng, levels=levels):
            each = losses_of(noised, s.objective, s.off, s.contrast, s.own)
            _add(s, each.mean())
    if s.preservation.active:
        preserved = _preserved(s, noised, levels)
        each = preserved if each is None else each
    if batch.per_image_loss is not None:
        assert each is not None
        batch.per_image_loss[0] = each.data
        batch.per_image_loss[1] = levels.data


def _preserved(s: State, noised: Noised, levels: Tensor) -> Tensor:
    """Computes each sample's loss of the preservation, after its backward pass. Adapters leave out other parts."""
    rng, xp, signed = noised.rng, noised.rng.xp, s.preservation.per_sample_sign
    one = xp.ones((1,), np.float32)
    if signed:
        one = xp.where(rng.uniform(Stream.SIGN)[:1] < np.float32(0.5), -one, one)
    strength = Tensor(one)
    with s.drops.during(replace(rng, samples=rng.samples + _FURTHER), strength if signed else None, levels):
        each = s.preservation.losses(_Predictions(noised, s.off, strength))
        _add(s, each.mean() * s.preservation_weight)
    return each


def _add(s: State, loss: Tensor) -> None:
    """Adds a loss to those of the step, and its gradients to the arena's."""
    (loss * s.optimizer.loss_scale).backward()
    s.loss.data[...] += loss.data


def losses_of(
    noised: Noised,
    objective: TrainingObjective,
    off: Callable[[], AbstractContextManager[None]] = nullcontext,
    contrast: Contrast | None = None,
    own: ObjectiveKind | None = None,
) -> Tensor:
    """Computes the losses of a micro-batch.

    Args:
        noised: the micro-batch.
        objective: makes target and loss.
        off: leaves adapters out, for what the base predicts.
        contrast: contrastive guidance; None: predictions are compared as they are.
        own: a registered objective, which makes the loss instead; None: there is none.

    Returns:
        Each sample's loss (B,), fp32.
    """
    share, target = noised.batch.base_is_target(), None
    if share is not None:
        base = base_prediction(noised, off)
        target = share * base + (1.0 - share) * objective.target(noised.latents, noised.noise, noised.t)
    weight = noised.batch.loss_weight()
    prediction = noised.prediction() if contrast is None else _contrasted(noised, objective, contrast, share)
    if own is not None:
        prediction, level = prediction.float(), objective.noise_level(noised.t)
        wanted = objective.target(noised.latents, noised.noise, noised.t) if target is None else target
        each = own.losses(prediction, wanted, noised.noise, level, noised.batch, partial(base_prediction, noised, off))
        return _for_each(each, own, prediction)
    return objective.losses(prediction, noised.latents, noised.noise, noised.t, weight, target)


def _for_each(each: Any, own: ObjectiveKind, prediction: Tensor) -> Tensor:
    """Returns each sample's loss (B,) of what a registered objective made. Raises ConfigError for anything else."""
    size, group = prediction.shape[0], max(1, len(own.group))
    shapes = dict.fromkeys([(size,), (size // group,)])
    if not isinstance(each, Tensor) or each.shape not in shapes:
        got = f"shape {each.shape}" if isinstance(each, Tensor) else kind_of(each)
        raise ConfigError(
            f"loss.objective: expected {type(own).__name__}.losses to give a tensor of shape "
            f"{' or '.join(map(str, shapes))}, a loss for each sample{' or group' * (group > 1)}, got {got}"
        )
    if prediction.requires_grad and not each.requires_grad:
        raise ConfigError(f"loss.objective: expected the loss of {type(own).__name__} to depend on its prediction")
    return each if each.shape == (size,) else each.reshape(-1, 1).expand(-1, group).reshape(size)


def _contrasted(noised: Noised, objective: TrainingObjective, contrast: Contrast, share: Tensor | None) -> Tensor:
    """Returns the prediction as contrastive guidance compares it; as it is where the base gives the target.

    The pass without a prompt comes first, so that its memory is free before activations are saved.
    """
    scales = contrast.scales(noised.rng, objective.levels(noised.t))
    with no_grad():
        without = noised.prediction(NO_PROMPT, scales).float()
    prediction = noised.prediction(guidance=scales).float()
    compared = contrast.unguided(prediction, scales, without)
    return compared if share is None else share * prediction + (1.0 - share) * compared


def batch_losses(
    denoiser: Denoiser,
    objective: TrainingObjective,
    dtype: DType,
    seed: int,
    batch: Batch,
    times: Tensor | None = None,
    contrast: Contrast | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each sample's loss (B,), fp32, and its position in the schedule (B,).

    Args:
        denoiser, objective, dtype, seed, batch, times: as in `Noised.of`.
        contrast: contrastive guidance; None: predictions are compared as they are.
    """
    noised = Noised.of(denoiser, objective, dtype, seed, batch, times)
    return losses_of(noised, objective, contrast=contrast), noised.t


def reduce(s: State) -> None:
    """Sums gradients and loss over all processes; each learns what the others tell. Alone it does nothing."""
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
    """Unscales, clips, adds noise and runs the optimizer, all or none; then zeroes the gradients and the loss."""
    s.optimizer.step(s.loss)
    s.limit()
    s.figures[0] = s.loss.data / s.optimizer.accumulation
    metrics = s.optimizer.metric_values
    s.figures[1 : 1 + metrics.size] = metrics
    if s.exchanged is not None:
        s.figures[1 + metrics.size :] = s.exchanged.rows
    s.optimizer.zero_grad()
    s.loss.data[...] = 0.0


FIELDS: Final = ("signal", "wait_ms", "memory", "loss")
"""What each process puts: the signal that it got, its wait for data, its peak bytes on the device so far, its loss."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedVector:
    """One vector that is summed over all processes: the loss, and a row for each process, which alone writes into it.

    So a stop that one process was asked for reaches all of them after the same step.

    Attributes:
        vector: fp32 (1 + 4 `world`,) on the device.
        mine: fp32, what this process puts, as long as `vector`; written by the host before each step.
        backend: the device.
        rank: the number of this process.
        world: how many there are.
    """

    vector: Array
    mine: Array
    backend: Backend
    rank: int
    world: int

    @classmethod
    def between(cls, group: ProcessGroup, backend: Backend) -> SharedVector | None:
        """Makes it for the processes of a group; None for one by itself."""
        if group.collectives is None:
            return None
        vector, mine = (backend.xp.zeros(1 + len(FIELDS) * group.world, np.float32) for _ in range(2))
        return cls(vector, mine, backend, group.rank, group.world)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `rows`, in order: signal_0, wait_ms_0, memory_0, loss_0, signal_1, ..."""
        return tuple(f"{name}_{rank}" for rank in range(self.world) for name in FIELDS)

    @property
    def rows(self) -> Array:
        """What each process put, after `reduce`."""
        return self.vector[1:]

    def put(self, signal_number: int, wait_ms: float, memory: int) -> None:
        """Sets the row of this process in this step."""
        row = np.zeros(self.mine.shape, np.float32)
        row[self._first : self._first + 3] = signal_number, wait_ms, memory
        self.backend.write(self.mine, row)

    def reduce(self, group: ProcessGroup, loss: Array) -> None:
        """Sums over all processes: the 0-d loss, in place, and the rows. Device work alone."""
        self.vector[...] = self.mine
        self.vector[0] = loss
        self.vector[self._first + 3] = loss
        group.all_reduce(self.vector)
        loss[...] = self.vector[0]

    @property
    def _first(self) -> int:
        return 1 + len(FIELDS) * self.rank
