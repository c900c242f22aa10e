"""Distils the small SDXL of the package to a flow of three steps without guidance.

    python scripts/small_sdxl/distil.py OUT.safetensors [--device cpu] [--images 512] [--steps 400] [--batch 16]

The teacher draws captions that leave the background open, in 10 steps with a guidance of 5. The student has its
weights, and learns the straight way from each noise to the image that the teacher drew of it (rectified flow, arXiv
2209.03003), at the levels where it is asked. So few steps and no guidance suffice: the noise decides for a background.
The ordinary loss pairs an image with any noise, and undoes that.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from loop import Training

from flame_train.config.load import load_located
from flame_train.data.padding import collate
from flame_train.data.samples import Samples
from flame_train.diffusion.samplers import guided
from flame_train.diffusion.samplers.euler import Euler
from flame_train.engine import Tensor, no_grad, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import is_float
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.model import Denoiser
from flame_train.models.common.small import SMALL_SDXL
from flame_train.quickstart.drawings import COLOURS, SHAPES
from flame_train.run.check.check_run import Checked, check
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling.draw import uncropped
from flame_train.run.train.step_state import load_denoiser
from flame_train.text_encoders.running import tokens_of

SIDE, GUIDANCE, FINE, FEW, SHIFT = 96, 5.0, 10, 3, 3.0
_RATE, _SEED = 4e-4, 2308
_AT_ONCE = {"cpu": 16, "cuda": 256}
Array = np.ndarray[Any, Any]
Conditioning = Mapping[str, Array]

CAPTIONS = tuple(
    f"a{'n' if not size and colour[0] in 'aeiou' else ''} {size}{colour} {shape}"
    for size, colour, shape in product(("", "large "), COLOURS, SHAPES)
)


class Opened(NamedTuple):
    """A model with the settings it was opened by."""

    checked: Checked
    denoiser: Denoiser
    device: str

    def conditioning(self, texts: Sequence[str]) -> Conditioning:
        """Returns what the network is told of captions, (N, ...) by name."""
        own = uncropped(self.checked.model, (SIDE, SIDE))
        batch = collate([tokens_of(self.checked.running, text) | own for text in texts])
        given = {n: tensor(a, "float32" if is_float(a.dtype) else None, self.device) for n, a in batch.items()}
        with no_grad():
            return {n: t.numpy() for n, t in self.denoiser.conditioned(given, np.dtype(np.float32)).items()}

    def path(self, steps: int) -> Any:
        config = self.checked.config
        return self.checked.model.path(config.model, config.loss, steps, (SIDE, SIDE))

    def draw(self, noise: Array, cond: Conditioning, steps: int, guidance: float = 1.0) -> Array:
        """Returns latents (N, h, w, Z). With guidance `cond` has as many rows again, of empty captions."""

        def ask(x: Tensor, t: Tensor, given: Any) -> Tensor:
            return self.checked.model.predict(self.denoiser.network, x, t, given, self.denoiser.guidance)

        begin, told = tensor(noise, device=self.device), {n: tensor(a, device=self.device) for n, a in cond.items()}
        return Euler().sample(guided(ask, guidance), begin, told, self.path(steps), lambda i: begin).numpy()


def opened(checkpoint: Path, device: str, prediction: str, **model: Any) -> Opened:
    """Opens the small SDXL or a student, with both text encoders."""
    sections = {
        "model": {"checkpoint": str(checkpoint), "prediction": prediction, **model},
        "data": {"path": str(SMALL_SDXL.parent), "resolution": SIDE, "bucket_step": 32},
        "text_encoders": {"cache": "off"},
        "train": {"precision": "fp32"},
        "loss": {"shift": SHIFT} if prediction == "flow" else {},
        "output": {"dir": "unused"},
    }
    checked = check(load_located(sections, []))
    return Opened(checked, load_denoiser(Plan(checked, Samples((), ())), device), device)


class Drawn(NamedTuple):
    """Noises with the latents that were drawn of them, and the number of each one's caption."""

    noise: Array
    image: Array
    caption: Array
    cond: Conditioning
    """Of each caption."""


def drawn(model: Opened, captions: Sequence[str], count: int, steps: int, guidance: float, seed: int) -> Drawn:
    """Draws `count` images of captions by turns."""
    shape = model.checked.model.vae.latent_shape((SIDE, SIDE))
    cond = model.conditioning([*captions, ""])
    noise = np.random.default_rng(seed).standard_normal((count, *shape)).astype(np.float32)
    caption = np.arange(count) % len(captions)
    found, many = [], _AT_ONCE[model.device]
    for first in range(0, count, many):
        rows = caption[first : first + many]
        rows = rows if guidance == 1.0 else np.concatenate([rows, np.full_like(rows, len(captions))])
        own = {name: array[rows] for name, array in cond.items()}
        found.append(model.draw(noise[first : first + many], own, steps, guidance))
    return Drawn(noise, np.concatenate(found), caption, cond)


def distil(student: Opened, pairs: Drawn, steps: int, batch: int) -> float:
    """Trains all weights of the network on the straight ways; returns the mean error of the last steps."""
    denoiser, model = student.denoiser, student.checked.model
    training = Training({"unet": denoiser.network}, student.device, _RATE, "fp32", decay=0.98)
    xp = training.backend.xp
    noises, images, captions = (xp.asarray(array) for array in pairs[:3])
    cond = {name: xp.asarray(array) for name, array in pairs.cond.items()}
    levels = np.asarray(student.path(FEW).levels, np.float32)
    gaps = -np.diff(levels)[: FEW - 1]  # the last level, of a thousandth, needs no lesson
    asked, wide = xp.asarray(levels[: FEW - 1]), xp.asarray(gaps / gaps.mean())
    rng = np.random.default_rng(_SEED)
    order = xp.asarray(rng.integers(len(pairs.noise), size=(steps + 8, batch)))
    turns = xp.asarray(np.arange(batch) % (FEW - 1))

    def loss() -> Tensor:
        rows = order[training.step_number.astype(np.int64)]
        s = asked[turns].reshape(-1, 1, 1, 1)
        noise, image, told = noises[rows], images[rows], captions[rows]
        given = {name: Tensor(array[told]) for name, array in cond.items()}
        x = Tensor((1 - s) * image + s * noise)
        error = model.predict(denoiser.network, x, Tensor(asked[turns]), given, denoiser.guidance)
        return (F.square(error - Tensor(noise - image)) * Tensor(wide[turns].reshape(-1, 1, 1, 1))).mean()

    step = training.captured(loss)
    for number in range(steps):
        training.optimizer.set("lr", _RATE * min(1.0, number / 20, 2.0 * (1.0 - number / steps)))
        step()
    training.finish()
    return float(training.backend.to_host(training.loss))


def write(denoiser: Denoiser, output: Path) -> None:
    """Writes the small SDXL's file with the student's weights in the place of its denoiser's."""
    with SafetensorsFile(SMALL_SDXL) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    weights = {name: weight.numpy() for name, weight in denoiser.network.weights()}
    for name, source in denoiser.model.denoiser.sources.items():
        tensors[source.names[0]] = np.ascontiguousarray(
            weights[name].reshape(tensors[source.names[0]].shape), np.float16
        )
    told = {"modelspec.title": "small SDXL of drawn shapes, distilled to a flow of three steps"}
    save_file(output, tensors, told | {"modelspec.prediction_type": "flow"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    teacher = opened(SMALL_SDXL, args.device, "epsilon")
    pairs = drawn(teacher, CAPTIONS, args.images, FINE, GUIDANCE, _SEED)
    student = opened(SMALL_SDXL, args.device, "flow")
    error = distil(student, pairs, args.steps, args.batch)
    write(student.denoiser, args.output)
    print(f"{args.output}: {args.images} images of the teacher learnt in {args.steps} steps, error {error:.4f}")


if __name__ == "__main__":
    main()
