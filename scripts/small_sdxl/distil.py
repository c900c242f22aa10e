"""Distils the small SDXL of the package to four steps without guidance, in eight minutes of CPU time.

    python scripts/small_sdxl/distil.py OUT.safetensors [--device cpu] [--scenes 160] [--steps 160]

The teacher draws scenes in 8 steps with a guidance of 5. The student has its weights, and learns to go from each of
its four levels to the next in one step of Euler's method, where the teacher takes two, of two passes each. So few
steps and no guidance suffice, and training on images with the ordinary loss undoes both.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from loop import Training

from flame_train.config.load import load_located
from flame_train.data.padding import collate
from flame_train.data.samples import Samples
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

SIDE, GUIDANCE, FINE, FEW = 96, 5.0, 8, 2
_BATCH, _RATE, _SEED = 16, 4e-4, 2308
Arrays = Mapping[str, np.ndarray[Any, Any]]


def opened(device: str) -> tuple[Any, Denoiser]:
    """The settings with the opened model, and its denoiser with both text encoders."""
    sections = {
        "model": {"checkpoint": str(SMALL_SDXL)},
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


def taught(checked: Any, denoiser: Denoiser, captions: list[str], device: str) -> tuple[Arrays, Arrays]:
    """Inputs, timesteps and slopes from each of the few levels to the next (4 N, ...), and the captions (N, ...)."""
    model, config = checked.model, checked.config
    fine, few = (model.path(config.model, config.loss, steps, (SIDE, SIDE)) for steps in (FINE, FEW))
    shape = model.vae.latent_shape((SIDE, SIDE))
    rng, rows, told = np.random.default_rng(_SEED), [], []
    for first in range(0, len(captions), _BATCH):
        texts = captions[first : first + _BATCH]
        cond = conditioning(checked, denoiser, texts, device)
        empty = conditioning(checked, denoiser, [""] * len(texts), device)
        noise = tensor(rng.standard_normal((len(texts), *shape)).astype(np.float32), device=device)

        def guided(x: Tensor, t: Tensor, both: tuple[Any, Any]) -> Tensor:
            with_text, without = (model.predict(denoiser.network, x, t, each, denoiser.guidance) for each in both)
            return without + (with_text - without) * GUIDANCE

        with no_grad():
            x, at = fine.begin(noise), [few.begin(noise)]
            for i in range(FINE):
                x = x + fine.slope(guided, x, i, (cond, empty)) * (fine.levels[i + 1] - fine.levels[i])
                if i + 1 == FINE or fine.times[i + 1] in few.times[1:]:
                    at.append(x)
        for i, (here, there) in enumerate(itertools.pairwise(at)):
            gap = few.levels[i + 1] - few.levels[i]
            seen = here.numpy() / np.sqrt(few.levels[i] ** 2 + 1.0)
            t = np.full(len(texts), few.times[i], np.int64)
            rows.append((seen, t, (there.numpy() - here.numpy()) / gap, first + np.arange(len(texts))))
        told.append({name: array.numpy() for name, array in cond.items()})
    x, t, slopes, words = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    arrays = {"x": x.astype(np.float32), "t": t, "slope": slopes.astype(np.float32), "words": words}
    return arrays, {name: np.concatenate([each[name] for each in told]) for name in told[0]}


def distil(checked: Any, denoiser: Denoiser, rows: Arrays, told: Arrays, steps: int, device: str) -> float:
    """Trains all weights of the network on the slopes; the mean error of the last steps."""
    training = Training({"unet": denoiser.network}, device, _RATE, "fp32", decay=0.99)
    xp = training.backend.xp
    on = {name: xp.asarray(array) for name, array in rows.items()}
    words = {name: xp.asarray(array) for name, array in told.items()}
    order = xp.asarray(np.random.default_rng(_SEED).integers(len(rows["t"]), size=(steps + 8, _BATCH)))

    def loss() -> Tensor:
        picked = order[training.step_number.astype(np.int64)]
        cond = {name: Tensor(array[on["words"][picked]]) for name, array in words.items()}
        given = Tensor(on["x"][picked]), Tensor(on["t"][picked]), cond, denoiser.guidance
        error = checked.model.predict(denoiser.network, *given) - Tensor(on["slope"][picked])
        return F.square(error).mean()

    step = training.captured(loss)
    for number in range(steps):
        training.optimizer.set("lr", _RATE * min(1.0, number / 20, 4.0 * (1.0 - number / steps)))
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
    save_file(output, tensors, {"modelspec.title": "small SDXL of drawn shapes, distilled to four steps"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=160)
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    checked, denoiser = opened(args.device)
    captions = [scene.caption for scene in scenes(args.scenes, (SIDE, SIDE), _SEED)]
    rows, told = taught(checked, denoiser, captions, args.device)
    error = distil(checked, denoiser, rows, told, args.steps, args.device)
    write(denoiser, args.output)
    print(f"{args.output}: {len(rows['t'])} steps of the teacher learnt in {args.steps}, error {error:.4f}")


if __name__ == "__main__":
    main()
