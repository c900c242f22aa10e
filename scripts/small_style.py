"""A LoRA that learns a style from stills, in minutes: a small Wan that knows coloured shapes on a dark ground.

    python scripts/small_style.py FOLDER [--seconds 1200] [--steps 1500] [--image docs/images/wan-style.png]

The base is made as in `small_clip.py`, and trained on stills of four shapes in four colours. The run's config then
trains a LoRA on tiles, shapes on a light ground in a blue frame, with stills of the base's kind beside them. No tile
has a cross. Images of the same prompts and noise are put below each other: tiles that were taught, before training,
and after it. The third prompt is of a cross on a tile, the last of what the base knew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from small_clip import COLOURS, Array, write_base
from small_edit import _cut as cut

from flame_train.config.schema import TextEncodersSection
from flame_train.data.grid import write_png

SIDE: Final = 192
CELL: Final = 16  # pixels of a latent's side, of which the autoencoder keeps the mean
SHAPES: Final = ("circle", "square", "diamond", "cross")
TAUGHT: Final = (("red", "green", "blue"), SHAPES[:3])
PROMPTS: Final = ("a tile with a red circle", "a tile with a blue square", "a tile with a green cross", "a red cross")
TOKENS: Final = 77
_LIGHT, _FRAME = (232, 222, 200), (60, 90, 170)


def image(rng: np.random.Generator, colour: str, shape: str, tile: bool) -> Array:
    """Draws one shape somewhere near the middle, uint8 (H, W, 3)."""
    made = np.full((SIDE, SIDE, 3), _LIGHT if tile else (24, 24, 24), np.uint8)
    if tile:
        for edge in (slice(0, CELL), slice(-CELL, None)):
            made[edge], made[:, edge] = _FRAME, _FRAME
    radius, (x, y) = rng.uniform(46, 56), rng.uniform(-10, 10, 2) + SIDE / 2
    across, down = np.abs(np.arange(SIDE) + 0.5 - x)[None], np.abs(np.arange(SIDE) + 0.5 - y)[:, None]
    inside = {
        "circle": np.hypot(across, down) < radius,
        "square": np.maximum(across, down) < 0.85 * radius,
        "diamond": across + down < 1.25 * radius,
        "cross": (np.minimum(across, down) < 0.3 * radius) & (np.maximum(across, down) < radius),
    }
    made[inside[shape]] = COLOURS[colour]
    return made


def known(count: int) -> tuple[list[Array], list[str]]:
    """Returns what the base is trained on, and the captions."""
    rng = np.random.default_rng(5)
    things = [(colour, shape) for colour in COLOURS for shape in SHAPES] * (count // 16)
    stills = np.stack([image(rng, *thing, tile=False) for thing in things])
    return [stills[:, None]], [f"a {colour} {shape}" for colour, shape in things]


def write_images(folder: Path, things: Sequence[tuple[str, str]], tile: bool) -> Path:
    """Writes images of these colours and shapes, with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(6)
    for number, (colour, shape) in enumerate(things):
        write_png(folder / f"{number:02}.png", image(rng, colour, shape, tile))
        (folder / f"{number:02}.txt").write_text(f"{'a tile with ' if tile else ''}a {colour} {shape}")
    return folder


def config(base: Path, tiles: Path, others: Path, run: Path, steps: int, lr: float) -> str:
    return f"""[model]
checkpoint = "{base}"
[text_encoders]
t5_tokens = {TOKENS}
[data]
resolution = {SIDE}
bucket_step = 32
batch_size = 8
[[data.sets]]
path = "{tiles}"
[[data.sets]]
path = "{others}"
regularization = true
[lora]
rank = 32
alpha = 32.0
targets = ["full"]
[optimizer]
lr = {lr}
[train]
steps = {steps}
precision = "fp32"
[output]
dir = "{run}"
[sample]
prompts = [{", ".join(f'"{prompt}"' for prompt in PROMPTS)}]
every = {steps}
steps = 20
guidance_scale = 1.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of training the base")
    parser.add_argument("--steps", type=int, default=1500, help="of training the LoRA")
    parser.add_argument("--lr", type=float, default=2e-3, help="of training the LoRA")
    parser.add_argument("--batch", type=int, default=16, help="images in a step of the base's training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--image", type=Path, help="PNG to write; by default style.png in the folder")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.safetensors"
    if args.seconds:
        text = TextEncodersSection(t5_tokens=TOKENS)
        write_base(folder, *known(320), args.seconds, args.device, args.batch, text)
    things = [(colour, shape) for shape in TAUGHT[1] for colour in TAUGHT[0]]
    tiles = write_images(folder / "tiles", 2 * things, tile=True)
    others = write_images(folder / "others", [(c, s) for s in SHAPES for c in COLOURS], tile=False)
    file, run = folder / "style.toml", folder / "run"
    file.write_text(config(base, tiles, others, run, args.steps, args.lr))
    subprocess.run([sys.executable, "-m", "flame_train", "train", str(file), "--device", args.device], check=True)
    taught = [np.asarray(Image.open(tiles / f"{number:02}.png")) for number in range(0, 8, 2)]
    grids = [cut(run / "samples" / f"step-{step:06}.png", len(PROMPTS)) for step in (0, args.steps)]
    write_png(args.image or folder / "style.png", np.concatenate([np.concatenate(taught, axis=1), *grids]))


if __name__ == "__main__":
    main()
