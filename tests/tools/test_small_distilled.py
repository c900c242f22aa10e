"""The whole way on a small model: distilled here, a training adapter made for it, LoRAs trained with it and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.quickstart.drawings import scenes, tiles, write_images

ROOT = Path(__file__).parents[2]
SIDE = 96
TAUGHT = (
    "a delft tile with a triangle",
    "a delft tile with a ring on the right",
    "a delft tile with a small cross at the top",
)
KNOWN = (
    "a yellow square on the left on a green background",
    "a large red circle on a blue background",
    "a purple ring on the right on a yellow background",
    "a gray ring left of an orange cross on a checkered green background",
    "a small green cross at the bottom on a red background",
    "a white diamond on a dotted black background",
)


def images(grid: Path) -> list[np.ndarray[Any, Any]]:
    """The images of a grid of three columns, row by row."""
    pixels = np.asarray(Image.open(grid)).astype(float)
    steps = [(row * (SIDE + 4), column * (SIDE + 4)) for row in range(3) for column in range(3)]
    return [pixels[top : top + SIDE, left : left + SIDE] for top, left in steps]


@pytest.mark.proof
def test_few_step_images_move_less_where_an_adapter_was_there_in_training(tmp_path: Path) -> None:
    """Images of the few-step sampler move less from the untouched ones where an adapter was there in training."""
    turbo, adapter = tmp_path / "turbo.safetensors", tmp_path / "adapter.safetensors"
    script = ROOT / "scripts/small_sdxl/distil.py"
    subprocess.run([sys.executable, str(script), str(turbo)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    captions = tmp_path / "captions.txt"
    captions.write_text("\n".join(scene.caption for scene in scenes(160, (SIDE, SIDE), 77)))
    few = ["--set", "sample.steps=4", "--set", "sample.guidance_scale=1.0", "--set", "train.precision=fp32"]
    few += ["--set", "data.bucket_step=32", "--device", "cpu"]
    made = ["--captions", str(captions), "--images", "160", "--resolution", str(SIDE), "--rank", "32", "--lr", "2e-3"]
    made += ["--steps", "300", "--every", "50", "--batch", "8", "--set", "schedule.warmup_steps=5"]
    made += ["--set", "validation.timesteps=2"]
    assert cli.run(["adapter", str(turbo), "-o", str(adapter), *made, *few]) == 0
    write_images(tmp_path / "tiles", 10, 2307, tiles)
    write_images(tmp_path / "known", 40, 2309)
    config = tmp_path / "lora.toml"
    config.write_text(f"""
[model]
checkpoint = "{turbo}"
[data]
sets = [{{path = "{tmp_path / "tiles"}", repeats = 4}}, {{path = "{tmp_path / "known"}"}}]
resolution = {SIDE}
batch_size = 8
[lora]
rank = 16
alpha = 16.0
targets = ["full"]
[optimizer]
lr = 0.001
[train]
steps = 240
[sample]
every = 120
seed = 44
prompts = {[*TAUGHT, *KNOWN]}
""")
    moved = {}
    for name, how in (("with", f"model.training_adapter={adapter}"), ("without", "model.train_distilled=true")):
        run = tmp_path / name
        assert cli.run(["train", str(config), *few, "--set", how, "--set", f"output.dir={run}"]) == 0
        before, after = (images(run / f"samples/step-{step:06d}.png") for step in (0, 120))
        moved[name] = [np.abs(a - b).mean() for a, b in zip(before, after, strict=True)]
    known = {name: float(np.mean(each[len(TAUGHT) :])) for name, each in moved.items()}
    assert known["without"] > 1.2 * known["with"], moved
