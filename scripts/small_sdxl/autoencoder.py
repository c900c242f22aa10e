"""Training the autoencoder: pixels back to themselves through an eighth of the resolution.

It sees every shape and texture, also those that the denoiser never does, as published autoencoders have seen more
than any one LoRA is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from draw import SHAPES, TEXTURES, render, scenes
from loop import Training
from model import normalise_latents

from flame_train.engine import Tensor, no_grad
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.engine.random import Rng
from flame_train.models.vae import Vae

Array = Any
_PICK, _NOISE, _WHERE = 40, 41, 42  # streams of random numbers
_KL = 5e-5
_AT_ONCE = 256


def pictures(xp: Any, size: tuple[int, int], count: int, seed: int) -> Array:
    """uint8 (count, H, W, 3): scenes with every shape and texture there is."""
    made = scenes(count, size, seed, (*SHAPES, "star"), (*TEXTURES, "striped"))
    return xp.concatenate([render(xp, made[i : i + _AT_ONCE], size) for i in range(0, count, _AT_ONCE)])


def to_unit(pixels: Array) -> Tensor:
    """uint8 RGB to [-1, 1]."""
    return Tensor(pixels.astype(np.float32) / np.float32(127.5) - np.float32(1.0))


def train_vae(
    vae: Vae, data: Sequence[Array], device: str, precision: str, seconds: float, batch: int, lr: float, side: int,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Trains on arrays of pictures, one a size, then makes the latents' spread what the scaling factor expects.

    A step sees squares of `side` pixels cut from anywhere in the pictures; whole pictures if it is 0.
    """
    training = Training({"vae": vae}, device, lr, precision)
    samples = training.backend.xp.arange(batch)

    def loss_over(pixels: Array) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            rng = Rng(training.backend.xp, 1, training.step_number, samples)
            rows = rng.randint(_PICK, len(pixels))
            return _loss(vae, to_unit(_cut(pixels, rows, side, rng) if side else pixels[rows]), rng, training.dtype)

        return loss

    training.run([training.captured(loss_over(pixels)) for pixels in data], seconds, report)
    training.finish()
    mean, std, noise = _moments(vae, data[0])
    report(f"latents: mean {mean.round(2)}, std {std.round(2)}, their noise {noise:.3f} of the std")
    normalise_latents(vae, mean, std)


def _cut(pixels: Array, rows: Array, side: int, rng: Rng) -> Array:
    """Squares (B, side, side, 3), each from its own place in pictures `rows`."""
    free = [n - side + 1 for n in pixels.shape[1:3]]
    words = rng.uniform(_WHERE, (2,))
    down, across = ((words[:, i] * np.float32(n)).astype(np.int64)[:, None] for i, n in enumerate(free))
    reach = rng.xp.arange(side)[None, :]
    return pixels[rows[:, None, None], (down + reach)[:, :, None], (across + reach)[:, None, :]]


def _loss(vae: Vae, x: Tensor, rng: Rng, dtype: DType) -> Tensor:
    """Absolute and squared error of pixels and of their slopes, which keeps edges sharp, and a little KL."""
    mean, logvar = (m.float() for m in vae.encode_moments(x.to(dtype)))
    z = mean + (logvar * 0.5).exp() * Tensor(rng.normal(_NOISE, mean.shape[1:]))
    error = vae.decode((z * vae.arch.scaling_factor).to(dtype)).float() - x
    across, down = error[:, :, 1:] - error[:, :, :-1], error[:, 1:] - error[:, :-1]
    kl = (mean.square() + logvar.exp() - 1.0 - logvar).mean() * 0.5
    return _abs(error) + error.square().mean() + (_abs(across) + _abs(down)) * 0.5 + kl * _KL


def _abs(x: Tensor) -> Tensor:
    return F.abs(x).mean()


def _moments(vae: Vae, pixels: Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]:
    """Mean and spread of each latent channel over some pictures, and the noise on them in shares of that spread."""
    means, noise = [], []
    for i in range(0, min(len(pixels), 512), _AT_ONCE):
        mean, logvar = encode(vae, pixels[i : i + _AT_ONCE])
        means.append(mean)
        noise.append(np.exp(0.5 * logvar).mean())
    every = np.concatenate(means)
    std = every.std((0, 1, 2))
    return every.mean((0, 1, 2)), std, float(np.mean(noise) / std.mean())


def encode(vae: Vae, pixels: Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Mean and log variance of the latents (N, H / 8, W / 8, Z), on the host."""
    with no_grad():
        mean, logvar = vae.encode_moments(to_unit(pixels))
        return mean.numpy(), logvar.numpy()


def reconstructed(vae: Vae, pixels: Array) -> np.ndarray[Any, Any]:
    """What comes back, uint8 on the host."""
    with no_grad():
        mean, _ = vae.encode_moments(to_unit(pixels))
        out = vae.decode(mean * vae.arch.scaling_factor).numpy()
    return np.rint((np.clip(out, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
