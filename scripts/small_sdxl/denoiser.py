"""Training the denoiser and both text encoders together, on latents that were encoded beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from autoencoder import encode
from loop import Training
from model import Networks, token_ids

from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import Tensor, nn, no_grad
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend
from flame_train.engine.random import Rng
from flame_train.models.sdxl.unet import vector_conditioning
from flame_train.quickstart.drawings import Scene, render
from flame_train.text_encoders.clip.encoder import end_positions

Array = Any
_PICK, _POSTERIOR = 40, 41  # streams of random numbers; the objective has its own
_DROPPED = 0.1  # share of captions replaced by nothing
_HEAVIEST = 20.0  # a timestep's weight at most, before they are brought to a mean of 1
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Latents:
    """Images of one size as the denoiser is trained on them, all on the device. Row 0 of the ids says nothing."""

    mean: Array  # (N, h, w, Z) fp32, unscaled
    logvar: Array
    ids: tuple[Array, Array]  # (N + 1, 77) int32 for each encoder
    ends: tuple[Array, Array]  # (N + 1,) int32
    time_ids: Array  # (N, 6) int32

    def __len__(self) -> int:
        return int(self.mean.shape[0])


def encoded(nets: Networks, scenes: Sequence[Scene], size: tuple[int, int], backend: Backend, seed: int) -> Latents:
    """Scenes drawn, encoded and tokenised. The sizes told beside them vary, since no drawing has a larger original."""
    xp = backend.xp
    drawn = [render(xp, scenes[i : i + _AT_ONCE], size) for i in range(0, len(scenes), _AT_ONCE)]
    mean, logvar = encode(nets.vae, xp.concatenate(drawn))
    ids = token_ids(["", *(s.caption for s in scenes)])
    ends = [backend.to_device(end_positions(i)) for i in ids]
    return Latents(
        mean,
        logvar,
        (backend.to_device(ids[0]), backend.to_device(ids[1])),
        (ends[0], ends[1]),
        backend.to_device(_time_ids(len(scenes), size, seed)),
    )


def _time_ids(count: int, size: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """(count, 6) int32: original height and width (up to three times the image's), crop, target."""
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(count) < 0.3, 1.0, rng.uniform(0.8, 3.0, count))
    original = np.rint(np.outer(scale, size))
    crop = np.where(rng.random((count, 2)) < 0.7, 0, rng.integers(0, 48, (count, 2)))
    return np.concatenate([original, crop, np.tile(size, (count, 1))], axis=1).astype(np.int32)


def conditioning(nets: Networks, ids: Sequence[Array], ends: Sequence[Array]) -> tuple[Tensor, Tensor]:
    """Context (B, 77, E) and pooled text of token ids, differentiable with respect to both encoders."""
    first, _ = nets.text_encoder(Tensor(ids[0]), Tensor(ends[0]))
    second, pooled = nets.text_encoder_2(Tensor(ids[1]), Tensor(ends[1]))
    assert pooled is not None
    return F.cat([first, second], dim=-1), pooled


def losses_of(
    nets: Networks, data: Latents, rows: Array, words: Array, rng: Rng, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The noise prediction's error (B,) on some rows with some captions (0: none), and the timesteps (B,)."""
    xp = rng.xp
    shape = data.mean.shape[1:]
    scale = np.float32(nets.vae.arch.scaling_factor)
    latents = (data.mean[rows] + xp.exp(0.5 * data.logvar[rows]) * rng.normal(_POSTERIOR, shape)) * scale
    x, t = Tensor(latents), objective.timesteps(rng)
    noise = objective.noise(rng, x)
    dtype = nn.compute_copy(nets.unet.out[2].weight).dtype
    context, pooled = conditioning(nets, [i[words] for i in data.ids], [e[words] for e in data.ends])
    vector = vector_conditioning(pooled, Tensor(data.time_ids[rows]))
    prediction = nets.unet(objective.noised(x, noise, t).to(dtype), t, context, vector)
    return objective.losses(prediction, x, noise, t), t


def train_denoiser(
    nets: Networks,
    data: Sequence[Latents],
    held_out: Sequence[Latents],
    device: str,
    precision: str,
    seconds: float,
    batch: int,
    lr: float,
    report: Callable[[str], None],
) -> None:
    """Trains UNet and text encoders, every other step on the first data, then puts the averaged weights in place."""
    parts = {n: m for n, m in nets.named().items() if n != "vae"}
    training = Training(parts, device, lr, precision, idle=_idle(nets))
    objective = Objective(NoiseSchedule.scaled_linear(), device=device)
    weights = Tensor(training.backend.to_device(weights_of(objective.schedule)))
    samples = training.backend.xp.arange(batch)

    def loss_over(latents: Latents) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            rng = Rng(training.backend.xp, 2, training.step_number, samples)
            drawn = rng.uniform(_PICK, (2,))
            rows = (drawn[:, 0] * np.float32(len(latents))).astype(np.int64)
            words = rng.xp.where(drawn[:, 1] < _DROPPED, 0, rows + 1)
            losses, t = losses_of(nets, latents, rows, words, rng, objective)
            return (losses * F.embedding(t, weights)).mean()

        return loss

    square, *others = [training.captured(loss_over(latents)) for latents in data]
    turns = [step for other in others for step in (square, other)] or [square]
    training.run(turns, seconds, report)
    training.finish()
    report(f"held-out loss of the averaged weights: {_held_out(nets, held_out, objective, training.backend):.4f}")


def weights_of(schedule: NoiseSchedule) -> np.ndarray[Any, Any]:
    """A weight for each timestep (T,): what a prediction of v would have (1 / abar), so that layout is learned too.

    Where there is nearly nothing but noise, what is predicted says little of the image, and the image, when it
    is drawn, is decided there.
    """
    heavy = np.minimum(1.0 / schedule.alphas_cumprod, _HEAVIEST)
    return (heavy / heavy.mean()).astype(np.float32)


def _idle(nets: Networks) -> tuple[str, ...]:
    """CLIP-L's last layer and norm, which SDXL never reads."""
    last = nets.text_encoder.arch.layers - 1
    return f"text_encoder.text_model.encoder.layers.{last}.", "text_encoder.text_model.final_layer_norm."


def _held_out(nets: Networks, data: Sequence[Latents], objective: Objective, backend: Backend) -> float:
    """The mean loss over images that are never trained on, each with 4 fixed noises."""
    losses = []
    with no_grad():
        for latents in data:
            for draw in range(4):
                rows = backend.xp.arange(len(latents))
                rng = Rng(backend.xp, 3, 1 << 31 | draw, rows)
                found, _ = losses_of(nets, latents, rows, rows + 1, rng, objective)
                losses.append(float(found.mean().numpy()))
    return float(np.mean(losses))
