"""A LoRA that learns an edit, on the CPU in minutes: a small Qwen-Image-Edit whose weights are set by hand.

    python scripts/small_edit.py FOLDER [--steps 60] [--image docs/images/qwen-edit.png]

The base has the published structure and draws its control image again, whatever the caption says. Its autoencoder keeps
the mean colour of 8 x 8 pixels. In its first block a token of the image finds the token of the control image in its own
place, by rotary positions alone. From that x0 the velocity is (x - x0) / t. The run's config trains a LoRA on pairs of
a drawing and its negative. Images of drawings that it never saw are put side by side, with their distance to the
negative: control image, before training, after it, and the negative.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from flame_train.data.grid import places, write_png
from flame_train.engine import functional as F
from flame_train.engine import nn, tensor
from flame_train.io.safetensors import save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.models.registry import FAMILIES
from flame_train.networks.latents import QWEN_MEAN, QWEN_STD
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.quickstart.drawings import render, scenes
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25

Array = np.ndarray[Any, Any]
SIDE: Final = 160  # pixels
CAPTION: Final = "make it a negative"
_COLOURS: Final = 3
_SPREAD: Final = 0.55  # of colours in [-1, 1]
_LOUD: Final = 20.0  # a constant beside which data hardly change a norm
# features of a token of the small denoiser: noised latents and their negative, what was found, and constants
_LATENTS, _DATA, _CONSTANT = 64, 4 * _COLOURS, 8
_WIDTH: Final = 2 * _LATENTS + 2 * _DATA + _CONSTANT  # 160
_FOUND: Final = 2 * _LATENTS
_SCALE: Final = 20.0  # values are so large, and their projection so small that a LoRA can turn it around
_SHARP: Final = 15.0  # what a place's score loses by a step of one radian, times 1 - cos 1


def zeros(network: nn.Module) -> dict[str, Array]:
    """All weights of a network, which do nothing yet; norms are neutral."""
    ones = ("norm.weight", "norm1.weight", "norm2.weight", "norm_out.weight", "norm_q.weight", "norm_k.weight")
    return {
        name: np.ones(shape, np.float32) if name.endswith(ones) else np.zeros(shape, np.float32)
        for name, shape in network.shapes().items()
    }


def autoencoder() -> dict[str, Array]:
    """Keeps the mean colour of 8 x 8 pixels, and draws it smoothly; its residual branches do nothing.

    Colours run as a pair of channels, x and -x, beside two constants. silu(u) - silu(-u) is u, so that nothing bends.
    """
    vae = Vae(VaeArch.tiny_qwen_image())
    made = zeros(vae)
    pairs = 2 * _COLOURS
    mean, smooth = np.zeros((3, 3)), np.outer([0.25, 0.5, 0.25], [0.25, 0.5, 0.25])
    mean[:2, :2] = 0.25
    for name, array in made.items():
        if name.endswith("nin_shortcut.weight"):
            for i in range(pairs + 2):
                array[i, i] = 1.0
        kernel = {"downsample.conv.weight": mean, "upsample.conv.weight": smooth}.get(name.split(".", 3)[-1])
        if kernel is not None:
            for i in range(pairs + 2):
                array[i, i] = kernel
    for i in range(_COLOURS):
        made["encoder.conv_in.weight"][[2 * i, 2 * i + 1], i, 1, 1] = 1.0, -1.0
        made["encoder.conv_out.weight"][i, [2 * i, 2 * i + 1], 1, 1] = np.array([1, -1]) * _level(32) * QWEN_STD[i]
        made["encoder.conv_out.weight"][i] /= _SPREAD
        made["decoder.conv_in.weight"][[2 * i, 2 * i + 1], i, 1, 1] = np.array([1, -1]) * _SPREAD / QWEN_STD[i]
        shift = QWEN_MEAN[i] * _SPREAD / QWEN_STD[i]
        made["decoder.conv_in.bias"][[2 * i, 2 * i + 1]] = -shift, shift
        made["decoder.conv_out.weight"][i, [2 * i, 2 * i + 1], 1, 1] = np.array([1, -1]) * _level(8)
    for name in ("quant_conv", "post_quant_conv"):
        made[f"{name}.weight"][:, :, 0, 0] = np.eye(len(made[f"{name}.weight"]))
    for half in ("encoder", "decoder"):
        made[f"{half}.conv_in.bias"][pairs : pairs + 2] = _LOUD
    made["encoder.conv_out.bias"][:16], made["encoder.conv_out.bias"][16:] = QWEN_MEAN, -20.0
    return made


def _level(channels: int) -> float:
    """What undoes the RMS norm of so many channels, of which two are loud."""
    return float(np.sqrt(2 * _LOUD**2 / channels))


def denoiser() -> tuple[QwenImage1Arch, dict[str, Array]]:
    """Predicts (x - x0) / t, with x0 from the token of the control image in the same place."""
    arch = QwenImage1Arch(width=_WIDTH, depth=2, head_dim=32, text_dim=256, axes=(4, 14, 14), zero_cond=True)
    network = QwenImage1(arch)
    made = zeros(network)
    rng = np.random.default_rng(7)
    latents = np.arange(_LATENTS)
    made["img_in.weight"][latents, latents], made["img_in.weight"][_LATENTS + latents, latents] = 1.0, -1.0
    made["img_in.bias"][-_CONSTANT:] = 3 * _LOUD * np.tile([1.0, -1.0], _CONSTANT // 2)
    deviation = 3 * _LOUD * np.sqrt(_CONSTANT / _WIDTH)  # of a token, almost whatever it holds
    for i in range(arch.depth):
        _block(made, f"transformer_blocks.{i}.", rng, deviation if i == 0 else 0.0)
    embedder = "time_text_embed.timestep_embedder.linear_"
    slow = slice(60, 128)  # frequencies that turn little from t = 0 to 1
    for part in (slow, slice(slow.start + 128, 256)):
        made[f"{embedder}1.weight"][:, part] = rng.standard_normal((_WIDTH, part.stop - part.start)) / 4
    made[f"{embedder}2.weight"][:] = rng.standard_normal((_WIDTH, _WIDTH)) / np.sqrt(_WIDTH) * 3
    made[f"{embedder}1.bias"][:], made[f"{embedder}2.bias"][:] = rng.standard_normal((2, _WIDTH))
    weights, bias = _one_over_t(made[f"{embedder}1.weight"], made[f"{embedder}2.weight"], made)
    made["norm_out.linear.weight"][:_WIDTH], made["norm_out.linear.bias"][:_WIDTH] = weights, bias - 1.0
    made["proj_out.weight"][latents, latents] = deviation / 2
    made["proj_out.weight"][latents, _LATENTS + latents] = -deviation / 2
    data = np.arange(_DATA)
    made["proj_out.weight"][data, _FOUND + data] = deviation / 2
    made["proj_out.weight"][data, _FOUND + _DATA + data] = -deviation / 2
    return arch, made


def _block(made: dict[str, Array], place: str, rng: np.random.Generator, deviation: float) -> None:
    """Fills a block: attention by place, whose values are data of which `deviation` undoes the norm; 0: none."""
    for stream in ("img_mod.1", "txt_mod.1"):
        parts = made[f"{place}{stream}.bias"].reshape(6, _WIDTH)
        parts[2], parts[5] = 1.0, 1.0  # gates
    # a pair of values a frequency; the first of the frame, and two of rows and of columns, decide
    first, turned = np.zeros(32), np.zeros(32)
    first[0:32:2] = 1.0
    turned[0:32:2] = 1.0
    turned[0:2] = np.cos(1.0), -np.sin(1.0)  # which scores most one frame on
    made[f"{place}attn.to_q.bias"][:], made[f"{place}attn.to_k.bias"][:] = np.tile(first, 5), np.tile(turned, 5)
    kept = np.zeros(32)
    for pair in (0, 2, 3, 9, 10):
        kept[2 * pair : 2 * pair + 2] = np.sqrt(_SHARP * np.sqrt(32) / 2)
    made[f"{place}attn.norm_q.weight"][:] = made[f"{place}attn.norm_k.weight"][:] = kept
    made[f"{place}attn.norm_added_q.weight"][:], made[f"{place}attn.norm_added_k.weight"][:] = 1.0, 0.0
    data = np.arange(_DATA)
    if deviation:
        made[f"{place}attn.to_v.weight"][data, data] = deviation * _SCALE
        made[f"{place}attn.to_out.0.weight"][_FOUND + data, data] = -1 / _SCALE
        made[f"{place}attn.to_out.0.weight"][_FOUND + _DATA + data, data] = 1 / _SCALE
    for stream in ("img_mlp", "txt_mlp"):  # an MLP that a LoRA on its second layer can put to use
        first_layer = made[f"{place}{stream}.net.0.proj.weight"]
        first_layer[:] = rng.standard_normal(first_layer.shape) / np.sqrt(_WIDTH)


def _one_over_t(first: Array, second: Array, made: dict[str, Array]) -> tuple[Array, float]:
    """Returns weights and bias by which the time's vector gives 1 / t, by least squares, as the network computes it."""
    t = np.linspace(0.01, 1.0, 2000, dtype=np.float32)
    hidden = F.timestep_embedding(tensor(t * 1000.0), 256)
    for i, weight in enumerate((first, second), 1):
        bias = made[f"time_text_embed.timestep_embedder.linear_{i}.bias"]
        hidden = F.silu(F.linear(hidden, tensor(weight), tensor(bias)))
    known = np.concatenate([hidden.numpy().astype(np.float64), np.ones((len(t), 1))], axis=1)
    weighed, count = known * t[:, None], known.shape[1]  # so that relative errors count
    small = 1e-4 * np.eye(count)
    found = np.linalg.lstsq(np.r_[weighed, small], np.r_[np.ones(len(t)), np.zeros(count)], rcond=None)[0]
    print(f"1 / t is off by at most {np.abs(weighed @ found - 1).max():.4f} of itself")
    return found[:-1], float(found[-1])


def write_base(folder: Path) -> Path:
    """Writes the checkpoint in one file, and its vocabulary of bytes; returns its path."""
    text, tower = Qwen3(Qwen3Arch.tiny_2_5()), VisionTower25(Vision25Arch.tiny())
    _, transformer = denoiser()
    parts = {"transformer": transformer, "vae": autoencoder()}
    for name, network in (("vision", tower), ("text_encoder", text)):
        network.init(np.random.default_rng(3), "float32")
        parts[name] = {n: np.array(t.numpy()) for n, t in network.weights()}
    prefixes = {c.name: c.prefixes[0] for c in FAMILIES["qwenimage1"].files.components}
    path = folder / "small-qwen-image-edit-2511.safetensors"
    save_file(path, {prefixes[part] + n: a for part, arrays in parts.items() for n, a in arrays.items()})
    write_vocabulary(folder, qwen=True)
    return path


def write_pairs(folder: Path, count: int, seed: int) -> tuple[Path, Path]:
    """Draws images and their negatives; returns both folders, the negatives' with captions."""
    made = render(np, scenes(count, (SIDE, SIDE), seed, textures=("plain",)), (SIDE, SIDE))
    before, after = folder / f"before-{seed}", folder / f"after-{seed}"
    for place, pixels in ((before, made), (after, 255 - made)):
        place.mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(pixels):
            write_png(place / f"{i:02}.png", np.asarray(image))
            if place is after:
                (place / f"{i:02}.txt").write_text(CAPTION)
    return before, after


def config(base: Path, pairs: tuple[Path, Path], shown: Path, run: Path, steps: int) -> str:
    """Returns the run's config, with a prompt for each drawing in `shown`."""
    prompts = "".join(
        f'[[sample.prompts]]\ntext = "{CAPTION}"\ncontrol = "{file}"\n' for file in sorted(shown.iterdir())
    )
    return f"""[model]
checkpoint = "{base}"
[data]
path = "{pairs[1]}"
control = "{pairs[0]}"
resolution = {SIDE}
bucket_step = 16
batch_size = 2
[lora]
rank = 16
alpha = 16.0
targets = ["transformer_blocks.*.attn.to_v", "transformer_blocks.*.attn.to_out.0"]
[optimizer]
lr = 2e-3
[train]
steps = {steps}
precision = "fp32"
[output]
dir = "{run}"
[sample]
every = {steps}
steps = 8
guidance_scale = 1.0
{prompts}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--images", type=int, default=24, help="pairs to learn from")
    parser.add_argument("--shown", type=int, default=4, help="drawings that it never sees")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--image", type=Path, help="PNG to write; by default edit.png in the folder")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base, pairs = write_base(folder), write_pairs(folder, args.images, 1)
    shown, wanted = write_pairs(folder, args.shown, 2)
    file, run = folder / "edit.toml", folder / "run"
    file.write_text(config(base, pairs, shown, run, args.steps))
    subprocess.run([sys.executable, "-m", "flame_train", "train", str(file), "--device", args.device], check=True)
    steps = [run / "samples" / f"step-{step:06}.png" for step in (0, args.steps)]
    rows = [
        _row(sorted(shown.iterdir())),
        *(_cut(step, args.shown) for step in steps),
        _row(sorted(wanted.glob("*.png"))),
    ]
    for name, row in zip(("before", "after"), rows[1:3], strict=True):
        print(f"{name} training: {np.abs(row.astype(float) - rows[3]).mean():.1f} of 255 from the negative")
    write_png(args.image or folder / "edit.png", np.concatenate(rows))


def _row(files: list[Path]) -> Array:
    """Images side by side."""
    return np.concatenate([np.asarray(Image.open(file).convert("RGB")) for file in files], axis=1)


def _cut(grid: Path, count: int) -> Array:
    """A run's preview of `count` images as one row."""
    with Image.open(grid) as image:
        pixels = np.asarray(image.convert("RGB"))
    corners = places(pixels.shape[:2], count)
    return np.concatenate([pixels[y : y + h, x : x + w] for y, x, h, w in corners], axis=1)


if __name__ == "__main__":
    main()
