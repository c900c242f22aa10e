"""Draws a sheet of images from captions with the small SDXL, to look at.

python scripts/small_sdxl/look.py flame_train/models/common/assets/small_sdxl.safetensors --out sheet.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from model import Networks, token_ids

from flame_train.data.grid import grid, write_png
from flame_train.diffusion.guidance import guided
from flame_train.diffusion.samplers.euler import Euler
from flame_train.diffusion.samplers.noise_path import NoisePath
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng
from flame_train.models.sdxl.unet import vector_conditioning
from flame_train.text_encoders.clip.encoder import encode_prompts

CAPTIONS = (
    "a large red circle in the middle on a blue background",
    "a small yellow square at the top left on a black background",
    "a green triangle on the right on a white background",
    "a white cross at the bottom on a dotted purple background",
    "a pink ring on a checkered gray background",
    "a black diamond at the bottom right on an orange background",
    "a red circle left of a blue square on a yellow background",
    "a white triangle above a black ring on a green background",
    "a large gray diamond on a pink background",
    "an orange cross on the left on a dotted green background",
    "a purple ring above a yellow cross on a gray background",
    "a blue circle",
)
_STREAM = 43


def sheet(
    nets: Networks,
    captions: Sequence[str],
    size: tuple[int, int],
    device: str,
    *,
    steps: int = 25,
    guidance: float = 3.0,
    seed: int = 0,
) -> np.ndarray[Any, Any]:
    """One image for each caption, all sampled at once, side by side (uint8)."""
    backend = get_backend(device)
    xp, count = backend.xp, len(captions)

    def conditioning(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids = [i[:, None] for i in token_ids(texts)]
        context, pooled = encode_prompts(nets.text_encoder, nets.text_encoder_2, *ids)
        sizes = Tensor(backend.to_device(np.tile(np.array([*size, 0, 0, *size], np.int32), (len(texts), 1))))
        return context, vector_conditioning(pooled, sizes)

    def denoise(x: Tensor, t: Tensor, cond: tuple[Tensor, Tensor]) -> Tensor:
        return nets.unet(x, t, *cond)

    shape = (size[0] // nets.vae.arch.downscale, size[1] // nets.vae.arch.downscale, nets.vae.arch.latent_channels)
    with no_grad():
        noise = Tensor(Rng(xp, seed, 0, xp.arange(count)).normal(_STREAM, shape))
        cond = conditioning([*captions, *[""] * (count if guidance != 1.0 else 0)])
        latents = Euler().sample(
            guided(denoise, guidance), noise, cond, NoisePath(NoiseSchedule.scaled_linear(), steps), lambda i: noise
        )
        pixels = nets.vae.decode(latents).numpy()
    return grid(list(np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--caption", action="append", help="again and again; some of our own if there is none")
    parser.add_argument("--size", default="128x128", help="height x width")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    nets = Networks.load(args.file, args.device)
    height, width = (int(n) for n in args.size.split("x"))
    pixels = sheet(
        nets,
        args.caption or CAPTIONS,
        (height, width),
        args.device,
        steps=args.steps,
        guidance=args.guidance,
        seed=args.seed,
    )
    write_png(args.out, pixels)


if __name__ == "__main__":
    main()
