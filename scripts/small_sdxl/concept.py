"""Does a LoRA teach the small SDXL something new without making it forget? Ten pictures of a star, or of stripes.

    python scripts/small_sdxl/concept.py flame_train/recipes/assets/small_sdxl.safetensors --out concept

Trains through the ordinary pipeline and prints the loss on held-out pictures, each with the same noise before and
after: of the new thing, and of the old ones that the model was made with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from draw import SHAPES, TEXTURES, Scene, render, scenes

from flame_train.adapters.formats import from_file
from flame_train.adapters.lora import attach_factors
from flame_train.config.schema import (
    CheckpointSection,
    Config,
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    SampleSection,
    ScheduleSection,
    TrainSection,
)
from flame_train.diffusion.objectives import Objective
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.recipes import RECIPES
from flame_train.recipes.before_after import write_before_after
from flame_train.recipes.pictures import noise_schedule
from flame_train.recipes.pipeline import make_plan, train_plan
from flame_train.training.encode import encode, keys_of
from flame_train.training.preview import write_png
from flame_train.training.stop import StopRequest
from flame_train.training.validate import held_out_loss

SIZES = ((96, 96), (64, 128), (128, 64))
NEW: dict[str, dict[str, Any]] = {"star": {"kinds": ("star",)}, "stripes": {"textures": ("striped",)}}
PROMPTS = {
    "star": ("a large red star on a blue background", "a yellow star on the left on a green background"),
    "stripes": ("a red circle on a striped blue background", "a white square on a striped green background"),
}
OLD = ("a large red circle on a blue background", "a yellow square on the left on a green background")


def main() -> None:
    args = _arguments()
    backend = get_backend(args.device)
    family = RECIPES["sdxl"]
    config = _config(args, _write(args.out / "new", 10, 1, **NEW[args.concept], alone=True))
    held_out = {
        "new": _write(args.out / "new-held-out", 24, 2, **NEW[args.concept], alone=True),
        "old": _write(args.out / "old-held-out", 48, 3),
    }
    with StopRequest() as stop:
        begin = time.monotonic()
        result = train_plan(make_plan(family, config, stop), args.device, stop)
        seconds = time.monotonic() - begin
        write_before_after(Path(result["samples"]), args.out / "before-after.png", args.steps)

        sets = {name: _examples(_config(args, path), args.device, stop) for name, path in held_out.items()}
        denoiser = family.denoiser(config, args.device)
        objective = Objective(noise_schedule(config), device=args.device)

        def measured() -> dict[str, float]:
            return {
                name: held_out_loss(
                    denoiser, objective, examples, device=args.device, dtype=as_dtype(args.precision), seed=7, draws=8
                )
                for name, examples in sets.items()
            }

        before = measured()
        attach_factors(denoiser.model, from_file(Path(result["lora"]), family.lora_names()).state[denoiser.component])
        after = measured()
    change = {name: round(after[name] / before[name] - 1.0, 4) for name in before}
    print(json.dumps({"before": before, "after": after, "change": change, "seconds": round(seconds, 1)}, indent=1))
    backend.synchronize()


def _config(args: argparse.Namespace, pictures: Path) -> Config:
    return Config(
        model=ModelSection(checkpoint=str(args.file.resolve())),
        data=DataSection(path=str(pictures), resolution=96, bucket_step=32, batch_size=args.batch),
        lora=LoraSection(rank=args.rank, alpha=float(args.rank), targets=("full",)),
        optimizer=OptimizerSection(lr=args.lr),
        schedule=ScheduleSection(name="cosine", warmup_steps=5),
        train=TrainSection(steps=args.steps, precision=args.precision),
        checkpoint=CheckpointSection(every=args.steps, keep=1),
        sample=SampleSection(every=args.steps, prompts=(*PROMPTS[args.concept], *OLD), steps=20, guidance=3.0),
        output=OutputSection(dir=str(args.out / "run")),
    )


def _write(folder: Path, count: int, seed: int, *, alone: bool = False, **what: Sequence[str]) -> Path:
    """Pictures of every size with their captions, as a dataset."""
    for i, size in enumerate(SIZES):
        share = count - 2 * (count // 4) if i == 0 else count // 4
        made = scenes(share, size, 100 + seed, what.get("kinds", SHAPES), what.get("textures", TEXTURES), alone)
        _write_size(folder, made, size)
    return folder


def _write_size(folder: Path, made: Sequence[Scene], size: tuple[int, int]) -> None:
    for i, (scene, pixels) in enumerate(zip(made, render(np, made, size), strict=True)):
        name = folder / f"{size[0]}x{size[1]}-{i:02}"
        write_png(name.with_suffix(".png"), pixels)
        name.with_suffix(".txt").write_text(scene.caption)


def _examples(config: Config, device: str, stop: StopRequest) -> list[Any]:
    family = RECIPES["sdxl"]
    placed = make_plan(family, config, stop).placed
    encoded = encode(placed, keys_of(placed, config, family, ()), config, family, device, stop)
    return [encoded.example(i, False) for i in range(len(placed.placements))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concept", default="star", choices=sorted(NEW))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
