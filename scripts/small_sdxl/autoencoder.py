"""Training the autoencoder, end to end, on squares cut from drawn images.

It sees every shape and texture, also those that the denoiser never does, as published autoencoders have seen more
than any one LoRA is about. Its latents are drawn towards the mean colours of 8 x 8 blocks: smooth latents, which a
small denoiser learns easily, and still free to carry what the decoder needs for sharp edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from loop import Training
from model import normalise_latents

from flame_train.engine import Tensor, no_grad
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend
from flame_train.engine.random import Rng
from flame_train.networks.vae.vae import Vae
from flame_train.quickstart.drawings import SHAPES, TEXTURES, render, scenes

Array = Any
_PICK, _WHERE, _NOISE = 40, 41, 42  # streams of random numbers
_BLUR = 0.05  # noise on the latents, in their own spread: the denoiser's will not be perfect either
_ANCHOR = 0.1  # weight of the distance between latents and mean colours
_CORNERS = np.array([(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]) / np.sqrt(3.0)
_COLOUR_SPREAD = 0.55  # of colours in [-1, 1]
_AT_ONCE = 256


def images(backend: Backend, size: tuple[int, int], count: int, seed: int) -> Array:
    """uint8 (count, H, W, 3): scenes with every shape and texture there is."""
    made = scenes(count, size, seed, (*SHAPES, "star"), (*TEXTURES, "striped"))
    xp = backend.xp
    return xp.concatenate([render(xp, made[i : i + _AT_ONCE], size) for i in range(0, count, _AT_ONCE)])


def to_unit(pixels: Array) -> Tensor:
    """uint8 RGB to [-1, 1]."""
    return Tensor(pixels.astype(np.float32) / np.float32(127.5) - np.float32(1.0))


def encode(vae: Vae, pixels: Array) -> tuple[Array, Array]:
    """Mean and log variance of the latents (N, H / 8, W / 8, Z), on the device."""
    parts = []
    with no_grad():
        for i in range(0, len(pixels), _AT_ONCE):
            parts.append([m.data for m in vae.encode_moments(to_unit(pixels[i : i + _AT_ONCE]))])
    xp = vae.quant_conv.weight.backend.xp
    mean, logvar = (xp.concatenate(p) for p in zip(*parts, strict=True))
    return mean, logvar


def train_autoencoder(
    vae: Vae,
    pixels: Array,
    device: str,
    precision: str,
    seconds: float,
    batch: int,
    lr: float,
    side: int,
    report: Callable[[str], None],
) -> None:
    """Trains both halves on squares of `side` pixels, then gives the latents the spread that diffusion expects."""
    training = Training({"vae": vae}, device, lr, precision)
    samples = training.backend.xp.arange(batch)
    step, scale = vae.arch.downscale, vae.arch.scaling_factor
    parts = range(0, len(pixels), _AT_ONCE)
    colours = training.backend.xp.concatenate([_mean_colours(pixels[i : i + _AT_ONCE], step) for i in parts])

    def loss() -> Tensor:
        rng = Rng(training.backend.xp, 1, training.step_number, samples)
        begin = _corners(rng, pixels.shape[1:3], side, step)
        rows = rng.randint(_PICK, len(pixels))
        x = to_unit(_cut(rng.xp, pixels, rows, begin, side))
        towards = _cut(rng.xp, colours, rows, begin // step, side // step)
        mean, _ = vae.encode_moments(x.to(training.dtype))
        z = mean.float() * scale
        noise = np.float32(_BLUR) * rng.normal(_NOISE, z.shape[1:])
        back = vae.decode((z + Tensor(noise)).to(training.dtype)).float()
        return _loss(back - x) + (z - Tensor(towards)).square().mean() * _ANCHOR

    training.run([training.captured(loss)], seconds, report)
    training.finish()
    mean, _ = encode(vae, pixels[:1024])
    get = training.backend.to_host
    normalise_latents(vae, get(mean.mean((0, 1, 2))), get(mean.std((0, 1, 2))))
    report(f"latents before they were normalised: std {get(mean.std((0, 1, 2)) * scale).round(3)}")


def _mean_colours(pixels: Array, block: int) -> Array:
    """(B, h, w, 4): each block's mean colour along the four directions to a tetrahedron's corners, of spread 1."""
    B, H, W, C = pixels.shape
    mean = to_unit(pixels).data.reshape(B, H // block, block, W // block, block, C).mean((2, 4))
    along = [sum(float(n) * mean[..., i] for i, n in enumerate(corner)) for corner in _CORNERS / _COLOUR_SPREAD]
    return Tensor(mean).backend.xp.stack(along, axis=-1)


def _corners(rng: Rng, size: tuple[int, int], side: int, step: int) -> Array:
    """(B, 2) int64: where each square begins, in pixels; a multiple of `step`."""
    words = rng.uniform(_WHERE, (2,))
    free = [(n - side) // step + 1 for n in size]
    return rng.xp.stack([(words[:, i] * np.float32(n)).astype(np.int64) * step for i, n in enumerate(free)], axis=1)


def _cut(xp: Any, arrays: Array, rows: Array, begin: Array, side: int) -> Array:
    """Squares (B, side, side, C), each from its own row and place."""
    reach = begin[:, :, None] + xp.arange(side)
    return arrays[rows[:, None, None], reach[:, 0, :, None], reach[:, 1, None, :]]


def _loss(error: Tensor) -> Tensor:
    """Absolute and squared error of pixels and of their slopes, which keeps edges sharp."""
    across, down = error[:, :, 1:] - error[:, :, :-1], error[:, 1:] - error[:, :-1]
    return _abs(error) + error.square().mean() + (_abs(across) + _abs(down)) * 0.5


def _abs(x: Tensor) -> Tensor:
    return F.abs(x).mean()


def reconstructed(vae: Vae, pixels: Array) -> np.ndarray[Any, Any]:
    """What comes back, uint8 on the host."""
    with no_grad():
        mean, _ = vae.encode_moments(to_unit(pixels))
        out = vae.decode(mean * vae.arch.scaling_factor).numpy()
    return np.rint((np.clip(out, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
