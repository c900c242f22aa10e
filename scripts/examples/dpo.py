"""An objective of one's own: Diffusion-DPO (arXiv 2311.12908) learns which image of a pair is preferred.

    flame-train quickstart q
    python scripts/examples/dpo.py q

The pairs are the quickstart's tiles (NAME.win.png), each beside itself in other colours (NAME.lose.png). To continue a
stopped run, start the script again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import flame_train
from flame_train.diffusion.losses import NoiseLevel
from flame_train.diffusion.objective_kind import ObjectiveKind, StepBatch
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.errors import ConfigError, FlameError, exit_status
from flame_train.settings import field


class DiffusionDPO(ObjectiveKind):
    """-log sigmoid(-beta / 2 (d_win - d_lose)), where d is by how much the LoRA's error is above the base's."""

    name = "dpo"
    group = ("win", "lose")

    dpo_beta: float = field(2000.0, "how strongly the LoRA is held to the base; higher: less", gt=0, le=1e6)

    def losses(
        self,
        prediction: Tensor,
        target: Tensor,
        noise: Tensor,
        level: NoiseLevel,
        batch: StepBatch,
        base: Callable[[], Tensor],
    ) -> Tensor:
        above = _errors(prediction, target) - _errors(base(), target)
        win, lose = F.unbind(above.reshape(-1, 2), 1)
        return -F.logsigmoid((win - lose) * (-0.5 * self.dpo_beta))


def _errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Returns each sample's mean squared error, (B,)."""
    return (prediction - target).square().mean((1, 2, 3))


def write_pairs(images: Path, pairs: Path) -> None:
    """Writes each image of a folder beside itself in other colours, with a caption of both, if that was not done."""
    if not images.is_dir():
        raise ConfigError(f"{images}: expected the images of a quickstart; run: flame-train quickstart {pairs.parent}")
    if pairs.is_dir():
        return
    pairs.mkdir()
    for path in sorted(images.glob("*.png")):
        pixels = np.asarray(Image.open(path).convert("RGB"))
        Image.fromarray(pixels).save(pairs / f"{path.stem}.win.png")
        Image.fromarray(np.ascontiguousarray(pixels[..., ::-1])).save(pairs / f"{path.stem}.lose.png")
        shutil.copy(path.with_suffix(".txt"), pairs / f"{path.stem}.txt")


def train(folder: Path, device: str, overrides: list[str], **more: Any) -> dict[str, Any]:
    """Trains a LoRA on pairs of the quickstart in `folder`, in `folder/dpo`, or continues its run."""
    flame_train.register(objective=DiffusionDPO)
    write_pairs(folder / "images" / "4_tiles", folder / "pairs")
    given = {
        "model.checkpoint": folder / "base.safetensors",
        "data.path": folder / "pairs",
        "data.batch_size": 4,
        "data.resolution": 96,
        "data.bucket_step": 32,
        "loss.objective": "dpo",
        "train.steps": 30,
        "train.precision": "fp32",
        "optimizer.lr": 0.0005,
        "schedule.name": "constant",
        "checkpoint.every": 10,
        "output.dir": folder / "dpo",
    }
    settings = [f"{path}={value}" for path, value in given.items()]
    return flame_train.train({}, overrides=[*settings, *overrides], device=device, **more)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of `flame-train quickstart`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="processes that train together")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    options = parser.parse_args()
    try:
        result = train(options.folder, options.device, options.set, gpus=options.gpus)
    except FlameError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_status(error))
    if result:
        print(f"mean loss {result['mean_loss']:.3f}, and ln 2 = 0.693 at the start: {result['lora']}")
