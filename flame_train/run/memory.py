"""The memory that a run is predicted to take, from its plan."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from flame_train.data.buckets import Size
from flame_train.engine.dtype import as_dtype, float32
from flame_train.optimizers import OPTIMIZERS
from flame_train.training.memory import MemoryQuery

from .check import Checked, fp8_of
from .encode import Encoding
from .sampling import image_size


def encoding_memory(encoding: Encoding, buckets: Collection[Size]) -> int:
    """Bytes on the device while captions are encoded, or images: the one follows the other.

    A caption passes by in a hundredth of what the text encoders weigh.
    """
    vae = encoding.vae.network
    item = as_dtype(encoding.vae_precision).itemsize
    pixels = max(h * w for h, w in buckets)
    images = (vae.num_weights() + pixels * vae.encoding()) * item
    room = (encoding.vae_precision == "fp32") * pixels * vae.workspace() * item
    text = sum(encoder.weight_bytes(encoding.precision, encoding.text_precision) for encoder in encoding.text)
    return max(text, images + room)


def training_memory(checked: Checked, buckets: Collection[Size], parameters: int, warpgroups: int) -> int:
    """Bytes on the device in training: weights, adapters with gradients and moments, and what a step keeps.

    Where grids are drawn their decoder is there all the time, and what a step takes is not given back for an image to
    be decoded, but for the workspace that large kernels share.
    """
    c, model = checked.config, checked.model
    vae, item = model.vae.network, as_dtype(c.train.precision).itemsize
    queries = [
        MemoryQuery(
            bucket,
            c.data.batch_size,
            item,
            c.gradient.checkpointing,
            c.train.deterministic,
            checked.checkpointed,
            warpgroups,
            frozenset(checked.targets),
        )
        for bucket in set(buckets)
    ]
    draws = bool(c.sample.every and c.sample.prompts)
    pixels = math.prod(image_size(c.sample, c.data.resolution, model))
    numbers = vae.num_weights() + pixels * vae.decoding()
    decoder = draws * numbers * as_dtype(c.model.vae_precision).itemsize
    step = max(model.activation_bytes(replace(query, deterministic=False)) for query in queries)
    scores = max(map(model.activation_bytes, queries)) - step
    wide = draws and c.model.vae_precision == "fp32"
    room = max(scores, wide * pixels * vae.workspace() * float32.itemsize)
    weights = model.network.weight_bytes(item, fp8_of(c.model.quantize, c.model.arithmetic))
    state = state_bytes(parameters, OPTIMIZERS.chosen(c.optimizer).bytes_per_parameter(), c.train.ema_decay > 0)
    return weights + state + decoder + step + room


def state_bytes(parameters: int, optimizer: float, averaged: bool = False) -> int:
    """The bytes of trained values, their gradients and compute copies, the optimizer's state, and their average.

    `optimizer` is the state's bytes for each trained value.
    """
    return round(parameters * (8 + optimizer + 4 * averaged))
