"""What a LoRA costs the model's other knowledge, with each kind of preservation and without: a table.

The small SDXL of the package knows coloured shapes. It is taught Delft tiles, on all attention layers and without an
image of what it knows. The loss of shapes and of tiles that were never trained on is measured before and after.

    python scripts/preservation_table.py FOLDER [--device cpu] [--steps 100]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import flame_train
from flame_train.config.load import load_located
from flame_train.models.registry import FAMILIES
from flame_train.quickstart.command import held_out_losses
from flame_train.quickstart.drawings import scenes, tiles, write_images
from flame_train.run.check.check import check
from flame_train.run.plan.plan import make_plan
from flame_train.training.stop import StopRequest

TILES, KNOWN, SEED = 10, 40, 7
_TAUGHT: Final = {"path": "images/tiles", "repeats": 4}
_KEPT: Final = {"path": "images/known", "regularization": True}


def variants(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of each run that differ from those of the first."""

    def sets(*tables: dict[str, Any]) -> dict[str, Any]:
        return {"sets": tuple({**table, "path": str(folder / table["path"])} for table in tables)}

    alone = sets(_TAUGHT)
    trigger = {"captions": {"trigger": "a delft tile"}}
    return {
        "nothing": {"data": alone},
        "class": {"data": alone, **trigger, "preservation": {"kind": "class", "class_word": "a square"}},
        "blank": {"data": alone, "preservation": {"kind": "blank"}},
        "regularisation images": {"data": sets(_TAUGHT, _KEPT)},
        "regularisation images, base as teacher": {"data": sets(_TAUGHT, {**_KEPT, "regularization_target": "base"})},
    }


def config(folder: Path, name: str, own: dict[str, Any], device: str, steps: int, batch: int) -> dict[str, Any]:
    """The sections of a run."""
    return {
        "model": {"checkpoint": str(folder / "base.safetensors")},
        "lora": {"rank": 16, "alpha": 16.0},
        "optimizer": {"lr": 2e-3},
        "train": {"steps": steps, "precision": "fp32" if device == "cpu" else "bf16"},
        "output": {"dir": str(folder / name.replace(" ", "-").replace(",", ""))},
        **own,
        "data": {"resolution": 96, "bucket_step": 32, "batch_size": batch, **own["data"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "base.safetensors").exists():
        write_images(folder / "images" / "tiles", TILES, SEED, tiles)
        write_images(folder / "images" / "known", KNOWN, SEED + 2, scenes)
        FAMILIES["sdxl"].write_small_base(folder, SEED)
    print("| kept by | loss of tiles, before and after | loss of known shapes, before and after |\n|---|---|---|")
    for name, own in variants(folder).items():
        sections = config(folder, name, own, args.device, args.steps, args.batch)
        result = flame_train.train(sections, device=args.device)
        measured = {**sections, "data": {**sections["data"], "sets": (), "path": str(folder / "images" / "tiles")}}
        plan = make_plan(check(load_located(measured, [])), StopRequest())
        losses = held_out_losses(plan, folder / "held-out", Path(result["lora"]), args.device, StopRequest())
        new, known = losses["new"], losses["known"]
        told = f"| {new['before']:.4f}, {new['after']:.4f} | {known['before']:.4f}, {known['after']:.4f} |"
        print(f"| {name} {told}", flush=True)


if __name__ == "__main__":
    main()
