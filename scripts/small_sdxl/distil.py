"""Distils the small SDXL of the package to a flow of three steps without guidance, in minutes of CPU time.

    python scripts/small_sdxl/distil.py OUT.safetensors [--device cpu] [--scenes 256] [--steps 400]

The teacher draws scenes in 10 steps with a guidance of 5. The student has its weights, and learns the straight way from
each noise to the image that the teacher drew of it (rectified flow, arXiv 2209.03003), at the three levels where it is
asked. So few steps and no guidance suffice. The ordinary loss pairs an image with any noise, and undoes that.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from flame_train.quickstart.drawings import scenes
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling.draw import uncropped
from flame_train.run.train.step_state import load_denoiser
from flame_train.text_encoders.running import tokens_of

SIDE, GUIDANCE, FINE, FEW = 96, 5.0, 10, 3
_BATCH, _RATE, _SEED = 16, 4e-4, 2308
Arrays = Mapping[str, np.ndarray[Any, Any]]


def opened(device: str, prediction: str) -> tuple[Any, Denoiser]:
    """The settings with the opened model, and its denoiser with both text encoders."""
    sections = {
        "model": {"checkpoint": str(SMALL_SDXL), "prediction": prediction},
        "data": {"path": str(SMALL_SDXL.parent), "resolution": SIDE, "bucket_step": 32},
        "text_encoders": {"cache": "off"},
        "train": {"precision": "fp32"},
        "output": {"dir": "unused"},
    }
    checked = check(load_located(sections, []))
    return checked, load_denoiser(Plan(checked, Samples((), ())), device)


def conditioning(checked: Any, denoiser: Denoiser, texts: list[str], device: str) -> dict[str, Tensor]:
    """What the network is told of captions, without a gradient."""
    own = uncropped(checked.model, (SIDE, SIDE))
    batch = collate([tokens_of(checked.running, text) | own for text in texts])
    given = {n: tensor(a, np.float32 if is_float(a.dtype) else None, device) for n, a in batch.items()}
    with no_grad():
        return {name: t.detach() for name, t in denoiser.conditioned(given, np.dtype(np.float32)).items()}


def path(checked: Any, steps: int) -> Any:
    return checked.model.path(checked.config.model, checked.config.loss, steps, (SIDE, SIDE))


def drawn(checked: Any, denoiser: Denoiser, noise: Any, cond: Any, steps: int, guidance: float) -> Any:
    def ask(x: Tensor, t: Tensor, given: Any) -> Tensor:
        return checked.model.predict(denoiser.network, x, t, given, denoiser.guidance)

    return Euler().sample(guided(ask, guidance), noise, cond, path(checked, steps), lambda i: noise)


def taught(checked: Any, denoiser: Denoiser, captions: list[str], device: str, seed: int) -> Arrays:
    """Noise, the teacher's latents of it and the conditioning, by name (N, ...)."""
    shape = checked.model.vae.latent_shape((SIDE, SIDE))
    rng, found = np.random.default_rng(seed), []
    for first in range(0, len(captions), _BATCH):
        texts = captions[first : first + _BATCH]
        cond, empty = (conditioning(checked, denoiser, each, device) for each in (texts, [""] * len(texts)))
        noise = tensor(rng.standard_normal((len(texts), *shape)).astype(np.float32), device=device)
        both = {name: F.cat([cond[name], empty[name]]) for name in cond}
        images = drawn(checked, denoiser, noise, both, FINE, GUIDANCE)
        found.append({"noise": noise.numpy(), "image": images.numpy(), **{n: t.numpy() for n, t in cond.items()}})
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def distil(checked: Any, denoiser: Denoiser, pairs: Arrays, steps: int, device: str) -> float:
    """Trains all weights of the network on the straight ways; the mean error of the last steps."""
    training = Training({"unet": denoiser.network}, device, _RATE, "fp32", decay=0.98)
    xp = training.backend.xp
    on = {name: xp.asarray(array) for name, array in pairs.items()}
    levels = np.asarray(path(checked, FEW).levels, np.float32)
    gaps = -np.diff(levels)
    asked, wide = xp.asarray(levels[:-1]), xp.asarray(gaps / gaps[: FEW - 1].mean())
    rng = np.random.default_rng(_SEED)
    order = xp.asarray(rng.integers(len(pairs["noise"]), size=(steps + 8, _BATCH)))
    turns = xp.asarray(np.tile(np.arange(_BATCH) % (FEW - 1), (steps + 8, 1)))

    def loss() -> Tensor:
        now = training.step_number.astype(np.int64)
        rows, at = order[now], turns[now]
        s = asked[at].reshape(-1, 1, 1, 1)
        noise, image = on["noise"][rows], on["image"][rows]
        cond = {name: Tensor(on[name][rows]) for name in on if name not in ("noise", "image")}
        given = Tensor((1 - s) * image + s * noise), Tensor(asked[at]), cond, denoiser.guidance
        error = checked.model.predict(denoiser.network, *given) - Tensor(noise - image)
        return (F.square(error) * Tensor(wide[at].reshape(-1, 1, 1, 1))).mean()

    step = training.captured(loss)
    for number in range(steps):
        training.optimizer.set("lr", _RATE * min(1.0, number / 20, 2.0 * (1.0 - number / steps)))
        step()
    training.finish()
    return float(training.backend.to_host(training.loss))


def write(denoiser: Denoiser, output: Path) -> None:
    """The small SDXL's file with the student's weights in the place of its denoiser's."""
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    captions = [scene.caption for scene in scenes(args.scenes, (SIDE, SIDE), _SEED)]
    pairs = taught(*opened(args.device, "epsilon"), captions, args.device, _SEED)
    checked, student = opened(args.device, "flow")
    error = distil(checked, student, pairs, args.steps, args.device)
    write(student, args.output)
    print(f"{args.output}: {args.scenes} images of the teacher learnt in {args.steps} steps, error {error:.4f}")


if __name__ == "__main__":
    main()
