"""Sample grids: the same prompts from the same noise each time, so that two grids differ by the training alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from flame_train.data.padding import Paddings, collate
from flame_train.diffusion.guidance import guided
from flame_train.diffusion.samplers import Path, Sampler
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.failpoint import fail_point
from flame_train.engine import Tensor, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, is_float
from flame_train.engine.random import Rng
from flame_train.errors import Interrupted, NonFiniteError, OtherRankFailed, is_device_failure
from flame_train.models.common.model import Example
from flame_train.progress import progress

from .stop import StopRequest

_LOG = logging.getLogger(__name__)
_GAP = 4  # pixels between the images of a grid
SAMPLE_NOISE = 33  # a stream of random numbers; see `engine/random.py`

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """The settings of an image's sampling: everything but the arrays of the prompts.

    `kept` is `Model.guidance_keeps`.
    """

    sampler: Sampler
    path: Path
    guidance: float
    seed: int
    latent: tuple[int, int, int]
    device: str
    dtype: DType
    paddings: Paddings
    kept: int = 0


def generate(
    d: SamplerSpec,
    denoise: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor],
    decode: Callable[[Tensor], Pixels],
    prompt: Example,
    negative: Example,
    stop: StopRequest,
    conditioned: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda arrays: arrays,
) -> Pixels:
    """Samples one image.

    Args:
        d: the settings of the sampler.
        denoise: the network: (x, t, conditioning) to its prediction.
        decode: decodes latents into pixels.
        prompt: the arrays of the prompt.
        negative: the arrays of the negative prompt.
        stop: raises Interrupted after a signal; checked between steps.
        conditioned: makes the conditioning of the arrays of both, once for all steps.

    Returns:
        The image, uint8 (H, W, 3).

    Raises:
        NonFiniteError: latents hold NaN or infinity.
    """
    backend, calls = get_backend(d.device), d.sampler.calls
    xp, asked = backend.xp, calls * (len(d.path.levels) - 1) - (calls - 1)
    with no_grad(), progress("sampling", 0 if backend.described else asked, leaves_line=False) as advance:

        def noise(number: int) -> Tensor:
            return Tensor(Rng(xp, d.seed, number, xp.zeros((1,), np.int64)).normal(SAMPLE_NOISE, d.latent))

        def step(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
            fail_point("sample.step")
            stop.check("while sampling")
            return denoise(x.to(d.dtype), t, cond).float()

        model = guided(step, d.guidance, d.kept)

        def told(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
            made = model(x, t, cond)
            advance(1)
            return made

        cond = conditioned(_conditioning([prompt] if d.guidance == 1.0 else [prompt, negative], d))
        latents = d.sampler.sample(told, noise(0), cond, d.path, lambda i: noise(i + 1))
        if not np.isfinite(latents.numpy()).all():
            raise NonFiniteError(
                "sampling gave NaN or infinity, which is no image; if it does so with every prompt, the model "
                "overflows in this precision: try bf16 or fp32"
            )
        return decode(latents)[0]


def _conditioning(examples: Sequence[Example], d: SamplerSpec) -> dict[str, Tensor]:
    """The examples as a batch on the device, floats in the model's dtype."""
    stacked = collate(examples, d.paddings)
    return {n: tensor(a, d.dtype if is_float(a.dtype) else None, d.device) for n, a in stacked.items()}


def grid(images: Sequence[Pixels], gap: int = _GAP) -> Pixels:
    """Images side by side in rows, near to square, on white; smaller ones at the top left of their places."""
    h, w = (max(image.shape[axis] for image in images) for axis in (0, 1))
    columns, rows = _columns_and_rows(len(images))
    sheet = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, np.uint8)
    for image, (top, left) in zip(images, _corners(len(images), h + gap, w + gap), strict=True):
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def places(sheet: tuple[int, int], count: int, gap: int = _GAP) -> tuple[tuple[int, int, int, int], ...]:
    """Where `grid` puts `count` images on a sheet (height, width): top, left, height and width of each place.

    None of them if no grid of so many images has that size.
    """
    columns, rows = _columns_and_rows(count)
    height, width = sheet[0] + gap, sheet[1] + gap
    if count == 0 or height % rows or width % columns or min(height // rows, width // columns) <= gap:
        return ()
    h, w = height // rows, width // columns
    return tuple((top, left, h - gap, w - gap) for top, left in _corners(count, h, w))


def _columns_and_rows(count: int) -> tuple[int, int]:
    columns = max(math.ceil(math.sqrt(count)), 1)
    return columns, max(math.ceil(count / columns), 1)


def _corners(count: int, height: int, width: int) -> list[tuple[int, int]]:
    columns, _ = _columns_and_rows(count)
    return [(i // columns * height, i % columns * width) for i in range(count)]


def png(pixels: Pixels, parameters: str = "") -> bytes:
    """The bytes of a PNG; `parameters` is the text that web interfaces read an image's settings from."""
    import io

    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer, texts = io.BytesIO(), PngInfo()
    if parameters:
        texts.add_text("parameters", parameters)
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def write_png(path: FilePath, pixels: Pixels, parameters: str = "") -> None:
    """A PNG, whole or not at all. Raises `OutputError` when the disk cannot take it."""
    raw = png(pixels, parameters)
    write_atomically(path, [raw], len(raw))


def best_effort(sample_images: Callable[[int], None]) -> Callable[[int], None]:
    """The function, whose failure costs the image, never the run. A signal ends it; the loop handles that."""

    def attempt(step: int) -> None:
        try:
            sample_images(step)
        except Interrupted:
            return
        except OtherRankFailed as e:
            if not e.by_signal:
                _LOG.warning("no sample grid at step %d: %s", step, e)
        except Exception as e:  # a decoder may run out of memory, a disk out of room: training goes on
            if is_device_failure(e):
                raise
            _LOG.warning("no sample grid at step %d: %s: %s", step, type(e).__name__, e)

    return attempt
