"""Trains the small SDXL from nothing: the autoencoder, then the denoiser with both text encoders.

python scripts/small_sdxl/train.py vae --device cuda --minutes 1 --out out
python scripts/small_sdxl/train.py base --vae out/vae.safetensors --device cuda --minutes 3 --out out
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from autoencoder import images, reconstructed, train_autoencoder
from denoiser import encoded, train_denoiser
from model import Networks, build, quiet_unused_words, token_ids, write

from flame_train.data.grid import write_png
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.models.sdxl.names import SDXL_FILES
from flame_train.quickstart.drawings import scenes

TITLE = "small SDXL of drawn shapes, trained from scratch by flame-train"
SEED = 2307


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    with deterministic(False), open(args.out / f"{args.part}.log", "w") as log:
        begin = time.monotonic()

        def report(line: str) -> None:
            print(f"[{time.monotonic() - begin:6.1f}] {line}", file=log, flush=True)
            print(f"[{time.monotonic() - begin:6.1f}] {line}", flush=True)

        report(f"{args.part} on {args.device}, {args.minutes} minutes, batch {args.batch}, lr {args.lr}")
        args.end = begin + 60 * args.minutes
        (_vae if args.part == "vae" else _base)(args, report)


def _vae(args: argparse.Namespace, report: Any) -> None:
    backend, size = get_backend(args.device), args.sizes[0]
    vae = build(SEED, args.device).vae
    data = images(backend, size, args.images, SEED)
    report(f"drawn: {data.shape}")
    train_autoencoder(
        vae, data, args.device, args.precision, args.end - time.monotonic(), args.batch, args.lr, args.side, report
    )
    fresh = images(backend, size, 16, SEED + 1)
    there, back = backend.to_host(fresh), reconstructed(vae, fresh)
    error = float(np.abs(back.astype(np.float32) - there.astype(np.float32)).mean())
    report(f"images never seen: mean error {error:.2f} of 255")
    rows = [np.concatenate(list(p), 1) for p in (there[:8], back[:8], there[8:], back[8:])]
    write_png(args.out / "vae.png", np.concatenate(rows))
    write(args.out / "vae.safetensors", {"vae": _weights(vae)}, TITLE)


def _base(args: argparse.Namespace, report: Any) -> None:
    backend = get_backend(args.device)
    begun = Networks.load(args.start, args.device) if args.start else build(SEED, args.device)
    nets = replace(begun, vae=SDXL_FILES.load(args.vae, "vae", device=args.device, dtype="float32"))
    data, held_out, captions = [], [], []
    for i, size in enumerate(args.sizes):
        made = scenes(args.images // (1 if i == 0 else 3), size, SEED)
        data.append(encoded(nets, made, size, backend, SEED))
        held_out.append(encoded(nets, scenes(64, size, SEED + 1), size, backend, SEED + 1))
        captions += [s.caption for s in made]
    report(f"encoded: {[d.mean.shape for d in data]}; std {float(backend.to_host(data[0].mean.std())) * 0.13025:.3f}")
    train_denoiser(
        nets, data, held_out, args.device, args.precision, args.end - time.monotonic(), args.batch, args.lr, report
    )
    weights = {name: _weights(part) for name, part in nets.named().items()}
    for name, ids in zip(("text_encoder", "text_encoder_2"), token_ids(["", *set(captions)]), strict=True):
        quiet_unused_words(weights[name], np.unique(ids), SEED)
    count = write(args.out / "small_sdxl.safetensors", weights, TITLE)
    report(f"wrote {count} weights")
    report("done")


def _weights(module: Any) -> dict[str, Any]:
    return {name: np.array(weight.numpy()) for name, weight in module.weights()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["vae", "base"])
    parser.add_argument("--vae", type=Path, help="the trained autoencoder (for base)")
    parser.add_argument("--start", type=Path, help="go on from these weights (for base)")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--minutes", type=float, default=1.0, help="for all but the export at the end")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--images", type=int, help="square ones; the others are fewer")
    parser.add_argument("--side", type=int, default=64, help="train on squares of this side cut from them (for vae)")
    parser.add_argument("--sizes", default="96x96,64x128,128x64", help="height x width, the square one first")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.sizes = [tuple(int(n) for n in size.split("x")) for size in args.sizes.split(",")]
    args.batch = args.batch or (32 if args.part == "vae" else 128)
    args.lr = args.lr or (2e-3 if args.part == "vae" else 1.5e-3)
    args.images = args.images or (4096 if args.part == "vae" else 12288)
    return args


if __name__ == "__main__":
    main()
