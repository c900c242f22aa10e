"""The whole way on a small model: distilled here, a training adapter made for it, LoRAs trained with it and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.quickstart.drawings import Scene, scenes, tiles, write_images
from flame_train.quickstart.page import Row, grid_images, write_page

ROOT = Path(__file__).parents[2]
SIDE, STEPS = 96, 120
TAUGHT = (
    "a delft tile with a triangle",
    "a delft tile with a ring on the right",
    "a delft tile with a small cross at the top",
)
KNOWN = (
    "a large red circle",
    "a purple ring on the right",
    "a white diamond",
    "a yellow square on the left",
    "a small green cross at the bottom",
    "an orange triangle",
)
"""They leave the background open, as prompts leave much open: the fast sampler has to decide for one."""


def open_scenes(count: int, size: tuple[int, int], seed: int) -> list[Scene]:
    """Scenes of one shape, whose captions do not say the background."""
    alone = (scene for scene in scenes(count, size, seed) if len(scene.shapes) == 1)
    return [scene._replace(caption=re.sub(r" on an? (\w+ )*background$", "", scene.caption)) for scene in alone]


def write_data(folder: Path, base: Path) -> Path:
    """Writes ten tiles, scenes of what the base knows, captions of such, and the config on them."""
    (folder / "captions.txt").write_text("\n".join(scene.caption for scene in open_scenes(400, (SIDE, SIDE), 77)))
    write_images(folder / "tiles", 10, 2307, tiles)
    write_images(folder / "known", 60, 2309, open_scenes)
    config = folder / "lora.toml"
    config.write_text(f"""
[model]
checkpoint = "{base}"
[data]
sets = [{{path = "{folder / "tiles"}", repeats = 3}}, {{path = "{folder / "known"}"}}]
resolution = {SIDE}
batch_size = 8
[lora]
rank = 16
alpha = 16.0
targets = ["full"]
[optimizer]
lr = 0.001
[train]
steps = {STEPS}
[sample]
every = {STEPS}
seed = 44
prompts = {[*TAUGHT, *KNOWN]}
""")
    return config


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_few_step_images_move_less_where_an_adapter_was_there_in_training(tmp_path: Path) -> None:
    """Images of the few-step sampler stay near the untouched ones where an adapter was there in training.

    `distilled.png` in the test's folder shows them; it is `docs/images/distilled.png`.
    """
    turbo, adapter = tmp_path / "turbo.safetensors", tmp_path / "adapter.safetensors"
    script = ROOT / "scripts/small_sdxl/distil.py"
    subprocess.run([sys.executable, str(script), str(turbo)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    config = write_data(tmp_path, turbo)
    few = ["model.prediction=flow", "sample.steps=3", "sample.guidance_scale=1.0", "train.precision=fp32"]
    few += ["data.bucket_step=32", "loss.timestep_sampling=uniform", "loss.shift=3.0"]
    how = [*(f"--set={setting}" for setting in few), "--device", "cpu"]
    made = ["--captions", str(tmp_path / "captions.txt"), "--images", "96", "--resolution", str(SIDE), "--rank", "32"]
    made += ["--lr", "2e-3", "--steps", "240", "--every", "60", "--batch", "8", "--set", "schedule.warmup_steps=5"]
    assert cli.run(["adapter", str(turbo), "-o", str(adapter), *made, "--set=validation.timesteps=2", *how]) == 0
    images = {}
    for name, more in (("with", f"model.training_adapter={adapter}"), ("without", "model.train_distilled=true")):
        run = tmp_path / name
        assert cli.run(["train", str(config), *how, "--set", more, "--set", f"output.dir={run}"]) == 0
        for step in (0, STEPS):
            grid = grid_images(run / f"samples/step-{step:06d}.png", [*TAUGHT, *KNOWN])
            images[name, step] = grid[len(TAUGHT) :]
    headings = {
        ("with", 0): "A few-step model, untouched",
        ("with", STEPS): "After a LoRA with a training adapter, drawn without the adapter",
        ("without", STEPS): "After a LoRA without one",
    }
    rows = [Row(heading, images[key]) for key, heading in headings.items()]
    write_page(tmp_path / "distilled.png", "A LoRA of something else, on a model distilled to three steps", rows)
    moved = {
        name: np.mean(
            [
                np.abs(a.pixels.astype(float) - b.pixels).mean()
                for a, b in zip(images[name, 0], images[name, STEPS], strict=True)
            ]
        )
        for name in ("with", "without")
    }
    assert moved["without"] > 2.0 * moved["with"], moved
