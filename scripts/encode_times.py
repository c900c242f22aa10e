"""How long captions and images of full size take to encode, on random weights, beside PyTorch where it is installed.

    python scripts/encode_times.py [--only clip,t5,vae,qwen3] [--torch] [--device cuda]

What is timed is what a run does of it: tokenizing or scaling, sending, computing, bringing back; a caption or an image
in ms, of the second half of many, so that all is compiled and captured. Each row is held to the one-by-one result of
the same encoder: bytes that differ end the script with 1. `--torch` runs the same networks in PyTorch, eager, one at a
time and in batches of the same size: diffusers' AutoencoderKL (TF32 is its default for convolutions), and text encoders
written as transformers has them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flame_train.data.reading import Reading
from flame_train.engine import no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.models.common.model import LoadedVae
from flame_train.run.plan.encoding import CaptionEncoders
from flame_train.tools.bench import randomise
from flame_train.tools.bench.models import find

CAPTION = "a photograph of a red fox that sits in deep snow between birches, late light, number {}"
Start = Callable[[Sequence[Any]], Callable[[], list[dict[str, Any]]]]


def timed(name: str, items: Sequence[Any], inputs: Callable[[Any], Any], start: Start, size: int) -> bool:
    """Prints ms an item, batch after batch, the next begun before the last is waited for; whether bytes are equal."""
    begin, waiting, found, marks = time.perf_counter(), None, list[dict[str, Any]](), list[float]()
    for i in range(0, len(items), size):
        following = start([inputs(item) for item in items[i : i + size]])
        if waiting is not None:
            found += waiting()
            marks.append(time.perf_counter())
        waiting = following
    assert waiting is not None
    found += waiting()
    marks.append(time.perf_counter())
    half = len(marks) // 2
    each = (marks[-1] - marks[half - 1]) / (len(marks) - half) / size * 1e3
    print(f"{name:<44} {each:8.2f} ms, first batch {marks[0] - begin:6.2f} s", flush=True)
    checked = [*range(min(3, len(items))), len(items) - 1]
    alone = [start([inputs(items[i])])()[0] for i in checked]
    same = all(
        found[i][n].tobytes() == a.tobytes() for i, made in zip(checked, alone, strict=True) for n, a in made.items()
    )
    if not same:
        print(f"{name:<44} DIFFERS from one by one")
    return same


def captions(model: str, keys: Sequence[str], count: int, device: str) -> bool:
    """The text encoders `keys` of a published model."""
    _, opened = find(model)
    chosen = [encoder for encoder in opened.text if encoder.key in keys]
    dtype, backend = as_dtype("bf16"), get_backend(device)
    for encoder in chosen:
        randomise(encoder.part.network, dtype, backend)
    encoders = CaptionEncoders(
        chosen, {e.part.component: e.part.network for e in chosen}, {e.key: dtype for e in chosen}, device
    )
    rng, texts = np.random.default_rng(0), [CAPTION.format(i) for i in range(count)]
    ids = {
        text: rng.integers(5, 32000, 512).astype(np.int32) for text in texts
    }  # T5's vocabulary comes with no package

    def inputs(text: str) -> Any:
        return {"t5": {"ids": ids[text]}} if "t5" in keys else encoders.inputs(Reading(text))

    return timed(f"a caption, {' and '.join(keys)}, bf16", texts, inputs, encoders.start, encoders.at_once)


def images(precision: str, count: int, device: str) -> bool:
    """SDXL's VAE on images of 1024 x 1024."""
    _, opened = find("sdxl")
    network = opened.vae.network
    randomise(network, as_dtype("fp32" if precision == "tf32" else precision), get_backend(device))
    vae = LoadedVae(network, device, "high" if precision == "tf32" else "highest")
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (1024, 1024, 3), np.uint8) for _ in range(count)]
    return timed(f"an image of 1024 x 1024, {precision}", pixels, vae.inputs, vae.encoder().start, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="clip,t5,vae")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    only, same = args.only.split(","), True
    with no_grad():
        if "clip" in only:
            same &= captions("sdxl", ["clip_l", "clip_g"], 512, args.device)
        if "t5" in only:
            same &= captions("flux-dev", ["t5"], 96, args.device)
        if "qwen3" in only:
            same &= captions("zimage", [encoder.key for encoder in find("zimage")[1].text], 256, args.device)
        for precision in ("bf16", "tf32", "fp32") if "vae" in only else ():
            same &= images(precision, 24, args.device)
            get_backend(args.device).empty_cache()
    if args.torch:
        import encode_torch

        encode_torch.main(only, args.device)
    sys.exit(not same)


if __name__ == "__main__":
    main()
