"""The loss on noise that training never sees, the same each time: two figures differ by the training alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flame_train.engine import no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType

from .batch import Batch, HostBatch
from .model import Example
from .step import Denoiser, Objective, batch_loss

FIRST_STEP = 1 << 31
"""Random numbers are named by step; training's steps stay below this one, so held-out noise is never trained on."""


def held_out_loss(
    denoiser: Denoiser,
    objective: Objective,
    examples: Iterable[Example],
    *,
    device: str,
    dtype: DType,
    seed: int,
    draws: int = 4,
) -> float:
    """The mean loss of examples over fixed noises and timesteps. It records no graph.

    Noise depends on the order of the examples and on `seed`, and on nothing else.

    Args:
        denoiser: the network.
        objective: gives noise, timesteps and the loss.
        examples: the arrays of each example.
        device: "cuda" or "cpu".
        dtype: dtype of the network's input.
        seed: seed of noise and timesteps.
        draws: noises and timesteps for each example.

    Returns:
        The mean.

    Raises:
        ValueError: there are no examples.
    """
    backend = get_backend(device)
    losses = []
    with no_grad():
        for i, example in enumerate(examples):
            arrays = {name: np.stack([array] * draws) for name, array in example.items()}
            host = HostBatch(arrays, FIRST_STEP + i, np.arange(draws), ())
            batch = Batch(host, backend, dtype)
            batch.fill(host)
            loss = batch_loss(denoiser, objective, dtype, seed, batch)
            losses.append(float(loss.numpy()))
    if not losses:
        raise ValueError("held_out_loss: expected at least one example, got none")
    return float(np.mean(losses))
