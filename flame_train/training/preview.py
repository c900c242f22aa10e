"""Sample grids: the same prompts from the same noise each time, so that two grids differ by the training alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.diffusion.samplers import guided
from flame_train.disk.durable import write_durably
from flame_train.disk.failpoint import hit
from flame_train.engine import Tensor, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, is_float
from flame_train.engine.random import Rng
from flame_train.errors import NonFiniteError

from .model import Example, Sampler
from .stop import StopRequest

_LOG = logging.getLogger(__name__)
PREVIEW_NOISE = 33  # a stream of random numbers; see `engine/random.py`

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Drawing:
    """The settings of sampling: everything but the prompts."""

    sampler: Sampler
    guidance: float
    seed: int
    latent: tuple[int, int, int]
    device: str
    dtype: DType


def draw(
    d: Drawing,
    denoise: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor],
    decode: Callable[[Tensor], Pixels],
    prompts: Sequence[Example],
    negative: Example,
    stop: StopRequest,
) -> list[Pixels]:
    """Samples one image for each prompt; image i starts from noise number seed + i.

    Args:
        d: the settings of the sampler.
        denoise: the network: (x, t, conditioning) to its prediction.
        decode: decodes latents into pixels.
        prompts: the arrays of each prompt.
        negative: the arrays of the negative prompt.
        stop: raises Interrupted after a signal; checked between steps.

    Returns:
        The images, uint8 (H, W, 3).

    Raises:
        NonFiniteError: latents hold NaN or infinity.
    """
    images = []
    xp = get_backend(d.device).xp
    with no_grad():
        for i, prompt in enumerate(prompts):
            noise = Tensor(Rng(xp, d.seed + i, 0, xp.zeros((1,), np.int64)).normal(PREVIEW_NOISE, d.latent))
            cond = _conditioning([prompt] if d.guidance == 1.0 else [prompt, negative], d)

            def step(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
                hit("sample.step")
                stop.check("while sampling")
                return denoise(x.to(d.dtype), t, cond).float()

            latents = d.sampler(guided(step, d.guidance), noise, cond)
            if not np.isfinite(latents.numpy()).all():
                raise NonFiniteError(
                    "sampling gave NaN or infinity, which is no image; if it does so with every prompt, the model "
                    "overflows in this precision: try bf16 or fp32"
                )
            images.append(decode(latents)[0])
    return images


def _conditioning(examples: Sequence[Example], d: Drawing) -> dict[str, Tensor]:
    """The examples as a batch on the device, floats in the model's dtype."""
    stacked = {name: np.stack([e[name] for e in examples]) for name in examples[0]}
    return {n: tensor(a, d.dtype if is_float(a.dtype) else None, d.device) for n, a in stacked.items()}


def grid(images: Sequence[Pixels], gap: int = 4) -> Pixels:
    """Images of one size side by side in rows, near to square, on white."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    h, w, _ = images[0].shape
    sheet = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(images):
        r, c = divmod(i, columns)
        sheet[r * (h + gap) : r * (h + gap) + h, c * (w + gap) : c * (w + gap) + w] = image
    return sheet


def png(pixels: Pixels) -> bytes:
    """The bytes of a PNG."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_png(path: Path, pixels: Pixels) -> None:
    """A PNG, whole or not at all. Raises `OutputError` when the disk cannot take it."""
    raw = png(pixels)
    write_durably(path, [raw], len(raw))
