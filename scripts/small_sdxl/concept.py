"""Does a LoRA teach the small SDXL something new without making it forget? Ten images: Delft tiles, stars or stripes.

    python scripts/small_sdxl/concept.py flame_train/models/common/assets/small_sdxl.safetensors --out concept

Trains through the ordinary pipeline and prints the loss on held-out images, each with the same noise before and
after: of the new thing, and of the old ones that the model was made with. `--known N` trains N old ones beside the ten,
which then come `--repeats` times an epoch, so that what is known stays.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from flame_train.adapters.attach import attach_factors
from flame_train.adapters.formats import from_file
from flame_train.config.outputs import OutputSection
from flame_train.config.schema import (
    CheckpointSection,
    Config,
    DataSection,
    LoraSection,
    LossSection,
    ModelSection,
    SampleSection,
)
from flame_train.config.updates import OptimizerSection, ScheduleSection, TrainSection
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.quickstart.drawings import Maker, scenes, tiles, write_images
from flame_train.quickstart.page import Row, sampled, taught, write_page
from flame_train.run.check.check import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.encode.encode import encode
from flame_train.run.plan.plan import make_plan
from flame_train.run.train.state import load_denoiser
from flame_train.training.session import Session
from flame_train.training.stop import StopRequest
from flame_train.training.validation import HeldOut, Validator

NEW: dict[str, Maker] = {
    "tiles": tiles,
    "star": partial(scenes, kinds=("star",), alone=True),
    "stripes": partial(scenes, textures=("striped",), alone=True),
}
PROMPTS = {
    "tiles": ("a delft tile with a large circle", "a delft tile with a square on the left"),
    "star": ("a large red star on a blue background", "a yellow star on the left on a green background"),
    "stripes": ("a red circle on a striped blue background", "a white square on a striped green background"),
}
OLD = ("a large red circle on a blue background", "a yellow square on the left on a green background")


def main() -> None:
    args = _arguments()
    backend = get_backend(args.device)
    folders = {name: args.out / name for name in ("images", "new", "old")}
    _write_trained(args, folders["images"])
    write_images(folders["new"], 24, args.seed + 1, NEW[args.concept])
    write_images(folders["old"], 48, args.seed + 1)
    config = _config(args, folders["images"])
    with StopRequest() as stop:
        begin = time.monotonic()
        plan = make_plan(check(config), stop)
        result = train_plan(plan, Session(args.device, stop=stop))
        seconds = time.monotonic() - begin
        _draw_page(config, args.out, Path(result["lora"]).with_name("samples"))

        sets = {
            name: _examples(_config(args, path), args.device, stop)
            for name, path in folders.items()
            if name != "images"
        }
        denoiser = load_denoiser(plan, args.device)
        objective = plan.model.objective(config.model, LossSection(), args.device)

        def measured() -> dict[str, float]:
            return {
                name: Validator(
                    denoiser,
                    objective,
                    HeldOut.of(examples),
                    timesteps=8,
                    batch_size=8,
                    device=args.device,
                    dtype=as_dtype(args.precision),
                )
                .measure()
                .loss
                for name, examples in sets.items()
            }

        before = measured()
        trained = from_file(Path(result["lora"]), plan.model.lora_names).state
        attach_factors(denoiser.network, trained[denoiser.component])
        after = measured()
    change = {name: round(after[name] / before[name] - 1.0, 4) for name in before}
    print(json.dumps({"before": before, "after": after, "change": change, "seconds": round(seconds, 1)}, indent=1))
    backend.synchronize()


def _draw_page(config: Config, folder: Path, samples: Path) -> None:
    """The page that `quickstart` draws, of this concept."""
    prompts = [prompt.text for prompt in config.sample.prompts]
    first, *_, last = sorted(samples.glob("step-*.png"))
    rows = [
        Row("Taught", taught(folder / "images" / "new-0")),
        Row("Before training", sampled(first, prompts)),
        Row(f"After {config.train.steps} steps", sampled(last, prompts)),
    ]
    write_page(folder / "before-after.png", "A concept for the small SDXL", rows, len(prompts) - len(OLD))


def _write_trained(args: argparse.Namespace, folder: Path) -> None:
    """The ten images, as often as they are to come in an epoch, and known ones that are not among the held-out."""
    for i in range(args.repeats):
        write_images(folder / f"new-{i}", 10, args.seed, NEW[args.concept])
    if args.known:
        write_images(folder / "known", args.known, args.seed + 2)


def _config(args: argparse.Namespace, images: Path) -> Config:
    return Config(
        model=ModelSection(checkpoint=str(args.file.resolve())),
        data=DataSection(path=str(images), resolution=96, bucket_step=32, batch_size=args.batch),
        lora=LoraSection(rank=args.rank, alpha=float(args.rank), targets=tuple(args.targets)),
        optimizer=OptimizerSection(lr=args.lr),
        loss=LossSection.model_validate(
            {"weighting": "min_snr", "snr_gamma": args.snr_gamma} if args.snr_gamma else {}
        ),
        schedule=ScheduleSection(name="cosine", warmup_steps=5),
        train=TrainSection(steps=args.steps, precision=args.precision),
        checkpoint=CheckpointSection(every=args.steps, keep=1),
        sample=SampleSection(every=args.steps, prompts=(*PROMPTS[args.concept], *OLD), steps=20, guidance_scale=3.0),
        output=OutputSection(dir=str(args.out / "run")),
    )


def _examples(config: Config, device: str, stop: StopRequest) -> list[Any]:
    plan = make_plan(check(config), stop)
    keys = plan.encoding.keys(plan.samples, ())
    encoded = encode(plan.encoding, plan.samples, keys, plan.model.size_conditioning, device, stop)
    return [encoded.example(i) for i in range(len(plan.samples.placements))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concept", default="tiles", choices=sorted(NEW))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--snr-gamma", type=float, default=0.0)
    parser.add_argument("--targets", nargs="+", default=["full"])
    parser.add_argument("--known", type=int, default=0, help="old images trained beside the new ones")
    parser.add_argument("--repeats", type=int, default=1, help="of each new image in an epoch")
    parser.add_argument("--seed", type=int, default=2307, help="of the images")
    return parser.parse_args()


if __name__ == "__main__":
    main()
