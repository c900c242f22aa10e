"""Shows what a training adapter keeps of a distilled model: made, tried and measured on the small SDXL.

    python scripts/small_sdxl/few_steps.py FOLDER [--device cpu] [--seed 0]

`distil.py` makes a student that draws in three steps. `flame-train adapter` makes a training adapter of what the
student draws. Two LoRAs then learn red stars beside images of what the student knows, one with the adapter in training
and one without. Both draw in three steps, without the adapter, the noises that the untouched student drew. FOLDER gets
the files, `report.json` and `few-steps.png`: the untouched student, with the adapter, without it. A student or adapter
that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from distil import CAPTIONS, FEW, FINE, GUIDANCE, SIDE, Array, Drawn, Opened, distil, drawn, opened, write

from flame_train import cli
from flame_train.adapters.attach import attach_factors
from flame_train.adapters.formats import from_file
from flame_train.data.grid import write_png
from flame_train.engine import no_grad, tensor
from flame_train.models.common.small import SMALL_SDXL
from flame_train.quickstart.drawings import render, scenes

KNOWN = ("a red circle", "a green square", "a yellow ring", "a large blue diamond")
OTHER = ("a blue ring", "a large green circle", "an orange diamond", "a white circle")
STAR = "a red star"
LEVELS = (0.1, 0.3, 0.5, 0.75, 0.9, 1.0)
GROUNDS = ("yellow", "green", "blue", "purple", "pink", "black", "white")


class Sizes(NamedTuple):
    """How much is drawn and learnt: steps with their batch."""

    captions: tuple[str, ...]
    pairs: int
    distil: tuple[int, int]
    own: int
    adapter: tuple[int, int]
    lora: tuple[int, int]


SIZES = {
    "cpu": Sizes((*KNOWN, *OTHER), 320, (300, 16), 256, (200, 16), (200, 8)),
    "cuda": Sizes(CAPTIONS, 4096, (1200, 64), 1024, (800, 64), (1000, 16)),
}
SETTINGS = (
    *("model.prediction=flow", f"sample.steps={FEW}", "sample.guidance_scale=1.0", "train.precision=fp32"),
    *("data.bucket_step=32", f"data.min_bucket={SIDE}", f"data.max_bucket={SIDE}", f"data.resolution={SIDE}"),
    *("loss.timestep_sampling=uniform", "loss.shift=3.0", "schedule.warmup=0.02"),
)


def flame_train(command: list[str], settings: tuple[str, ...], device: str) -> None:
    given = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    if cli.run([*command, *given, "--device", device]):
        raise SystemExit(f"flame-train {command[0]} failed")


def write_images(folder: Path, images: Array | list[Array], captions: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for i, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        write_png(folder / f"{i:04}.png", pixels)
        (folder / f"{i:04}.txt").write_text(f"{caption}\n")


def decoded(model: Opened, latents: Array) -> list[Array]:
    vae = model.checked.model.vae.load("fp32", model.device, 0)
    return [vae.decode(tensor(one[None], device=model.device))[0] for one in latents]


def make_student(file: Path, sizes: Sizes, device: str, seed: int) -> None:
    pairs = drawn(opened(SMALL_SDXL, device, "epsilon"), sizes.captions, sizes.pairs, FINE, GUIDANCE, seed + 1)
    student = opened(SMALL_SDXL, device, "flow")
    print(f"distilled: error {distil(student, pairs, *sizes.distil):.4f}", flush=True)
    write(student.denoiser, file)


def make_adapter(file: Path, student: Path, sizes: Sizes, device: str, seed: int) -> None:
    captions = file.with_suffix(".txt")
    captions.write_text("\n".join(sizes.captions) + "\n")
    steps, batch = sizes.adapter
    command = ["adapter", str(student), "-o", str(file), "--captions", str(captions), "--images", str(sizes.own)]
    command += ["--resolution", str(SIDE), "--rank", "32", "--lr", "3e-3", "--steps", str(steps)]
    command += ["--every", str(steps // 4), "--batch", str(batch)]
    flame_train(command, ("validation.timesteps=4", f"train.seed={seed}"), device)


def write_data(folder: Path, student: Opened, seed: int) -> None:
    """Writes stars, and images of what the student knows, drawn by itself."""
    made = (s for s in scenes(4000, (SIDE, SIDE), 5, kinds=("star",), textures=("plain",), alone=True))
    found = [s for s in made if s.ground in GROUNDS][:24]
    found = [s._replace(shapes=(s.shapes[0]._replace(colour="red", centre=(48.0, 48.0), radius=28.0),)) for s in found]
    write_images(folder / "stars", render(np, found, (SIDE, SIDE)), [STAR] * len(found))
    known = drawn(student, KNOWN, 96, FEW, 1.0, seed + 3)
    write_images(folder / "known", decoded(student, known.image), [KNOWN[i] for i in known.caption])


def make_lora(run: Path, student: Path, sizes: Sizes, device: str, seed: int, adapter: Path | None) -> None:
    config = run.with_suffix(".toml")
    stars, known = run.parent / "stars", run.parent / "known"
    steps, batch = sizes.lora
    config.write_text(
        f'[model]\ncheckpoint = "{student}"\n'
        f'[data]\nsets = [{{path = "{stars}", repeats = 4}}, {{path = "{known}"}}]\nbatch_size = {batch}\n'
        '[lora]\nrank = 16\nalpha = 16.0\ntargets = ["full"]\n[optimizer]\nlr = 1e-3\n'
        f'[train]\nsteps = {steps}\nseed = {seed}\n[output]\ndir = "{run}"\nname = "lora"\n'
    )
    more = f"model.training_adapter={adapter}" if adapter else "model.train_distilled=true"
    flame_train(["train", str(config)], (more,), device)


def velocity_errors(model: Opened, own: Drawn) -> list[float]:
    """Returns by level how far the prediction is from the velocity of own images under other noise."""
    rng, row = np.random.default_rng(11), []
    given = {name: tensor(a[own.caption], device=model.device) for name, a in own.cond.items()}
    for s in LEVELS:
        noise = np.asarray(rng.standard_normal(own.image.shape), np.float32)
        x = tensor(np.asarray((1 - s) * own.image + s * noise, np.float32), device=model.device)
        level = tensor(np.full(len(noise), s, np.float32), device=model.device)
        with no_grad():
            denoiser = model.denoiser
            velocity = model.checked.model.predict(denoiser.network, x, level, given, denoiser.guidance).numpy()
        row.append(round(float(np.square(velocity - (noise - own.image)).mean()), 4))
    return row


def drawn_with(model: Opened, run: Path | None, prompts: tuple[str, ...], count: int, seed: int) -> list[Array]:
    """Draws in few steps what the model draws of these noises with a run's LoRA, or alone."""
    attached = None
    if run:
        state = from_file(run / "lora.safetensors", model.checked.model.lora_names).state
        attached = attach_factors(model.denoiser.network, state[model.denoiser.component])
    images = decoded(model, drawn(model, prompts, count, FEW, 1.0, seed).image)
    if attached:
        attached.detach()
    return images


def levels(turbo: Path, adapter: Path, device: str, seed: int) -> dict[str, Any]:
    """Returns the velocity's errors alone and with the adapter, on images that neither was made of."""
    student = opened(turbo, device, "flow", train_distilled=True)
    own = drawn(student, (*KNOWN, *OTHER), 64, FEW, 1.0, seed + 4)
    helped = opened(turbo, device, "flow", training_adapter=str(adapter))
    return {"levels": LEVELS, "alone": velocity_errors(student, own), "with_adapter": velocity_errors(helped, own)}


def distances(folder: Path, turbo: Path, device: str, seed: int) -> dict[str, Any]:
    """Returns how far few-step images moved from the untouched ones, and how much those of a caption differ, of 255."""
    student, found = opened(turbo, device, "flow", train_distilled=True), {}
    runs = {"untouched": None, "with": folder / "with", "without": folder / "without"}
    shown: dict[str, list[Array]] = {name: [] for name in runs}
    for kind, prompts, count in (("known", KNOWN, 48), ("others", OTHER, 48), ("stars", (STAR,), 8)):
        images = {name: drawn_with(student, run, prompts, count, seed + 5) for name, run in runs.items()}
        pixels = {name: np.stack(row).astype(float) for name, row in images.items()}
        for name, array in pixels.items():
            moved = np.abs(array - pixels["untouched"]).mean()
            spread = np.mean([array[i :: len(prompts)].std(0).mean() for i in range(len(prompts))])
            found[f"{kind}_{name}"] = {"moved": round(float(moved), 2), "spread": round(float(spread), 2)}
        for name, row in images.items():
            shown[name] += row[:5]
    write_png(folder / "few-steps.png", np.concatenate([np.concatenate(row, 1) for row in shown.values()]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, device, seed, sizes = args.folder.resolve(), args.device, args.seed, SIZES[args.device]
    folder.mkdir(parents=True, exist_ok=True)
    turbo, adapter = folder / "turbo.safetensors", folder / "adapter.safetensors"
    if not turbo.exists():
        make_student(turbo, sizes, device, seed)
    if not adapter.exists():
        make_adapter(adapter, turbo, sizes, device, seed)
    found = {"velocity_errors": levels(turbo, adapter, device, seed)}
    write_data(folder, opened(turbo, device, "flow"), seed)
    for name, used in (("with", adapter), ("without", None)):
        make_lora(folder / name, turbo, sizes, device, seed, used)
    found["distances"] = distances(folder, turbo, device, seed)
    (folder / "report.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
