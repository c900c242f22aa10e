"""How long a dataset of many images takes to read and plan, and a restart from a full cache; and how much memory.

    python scripts/large_dataset.py FOLDER [--count 100000] [--side 256] [--texts 1]

FOLDER gets the images, JPEGs of a few drawings that differ in a comment, and their captions; they stay for the next
measurement. Each measurement is a process of its own: a first start, which decodes every image, a second, and one with
a cache that holds every entry. The entries are zeros: nothing looks at their values before training.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def make_images(folder: Path, count: int, side: int) -> None:
    """Writes the images that are not there yet, in folders of a thousand."""
    from PIL import Image

    rng, bodies = np.random.default_rng(0), []
    for number in range(20):
        small = rng.integers(0, 256, (8, 8, 3), np.uint8)
        image = Image.fromarray(small).resize((side + number % 5 * 32, side), Image.Resampling.BICUBIC)
        raw = io.BytesIO()
        image.save(raw, "JPEG", quality=90)
        bodies.append(raw.getvalue())
    for number in range(count):
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        comment, body = f"{number:016d}".encode(), bodies[number % len(bodies)]
        path.write_bytes(body[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + body[2:])
        path.with_suffix(".txt").write_text(f"image {number}, tag {number % 97}, tag {number % 89}, more")


def config(folder: Path, texts: int) -> Any:
    from flame_train.config import schema
    from flame_train.models.common.small import SMALL_SDXL

    return schema.Config(
        model=schema.ModelSection(checkpoint=str(SMALL_SDXL)),
        data=schema.DataSection(path=str(folder), resolution=64, bucket_step=32, cache=str(folder.parent / "cache")),
        captions=schema.CaptionKeys(shuffle=texts > 1, variants=texts),
        train=schema.TrainSection(precision="fp32"),
        output=schema.OutputSection(dir=str(folder.parent / "run")),
    )


def measure(folder: Path, texts: int, what: str) -> dict[str, float]:
    """Seconds and MiB of this process, from the config on."""
    from flame_train.run.check.check import check
    from flame_train.run.commands.stages import sources_of
    from flame_train.run.encode.encode import encode
    from flame_train.run.plan.plan import make_plan
    from flame_train.training.stop import StopRequest

    stop, begin = StopRequest(), time.monotonic()
    plan = make_plan(check(config(folder, texts)), stop)
    plan.order.batch_at(0)
    times = {"plan": time.monotonic() - begin}
    if what != "plan":
        keys = plan.encoding.keys(plan.samples, plan.prompts)
        sources_of(plan, keys)
        times["keys"] = time.monotonic() - begin
        if what == "fill":
            fill(plan, keys)
        else:
            encode(plan.encoding, plan.samples, keys, plan.model.size_conditioning, "cpu", stop)
        times["all"] = time.monotonic() - begin
    times["processor"] = time.process_time()
    times["MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: round(value, 2) for name, value in times.items()}


def fill(plan: Any, keys: Any) -> None:
    """Entries of zeros for all keys that have none."""
    from flame_train.data.cache import DiskCache

    cache, encoding = DiskCache(plan.encoding.folder), plan.encoding
    os.fsync = lambda _: None  # of this process, which waits ten milliseconds an entry otherwise
    for row, images in zip(plan.samples.rows, keys.images, strict=True):
        for key in images:
            if not cache.path(key).exists():
                shapes = encoding.image_shapes(row.placement)
                cache.put(key, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    for key in keys.captions.values():
        if not cache.path(key).exists():
            cache.put(key, {n: np.zeros(shape, np.float32) for e in encoding.text for n, shape in e.outputs.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--measure", choices=("plan", "fill", "restart"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    images = args.folder / "images"
    if args.measure:
        print(json.dumps(measure(images, args.texts, args.measure)))
        return
    make_images(images, args.count, args.side)
    for name, what in (
        ("first", "plan"),
        ("second", "plan"),
        ("fill", "fill"),
        ("third", "restart"),
        ("fourth", "restart"),
    ):
        command = [sys.executable, __file__, str(args.folder), "--texts", str(args.texts), "--measure", what]
        print(
            name, what, subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True
        )


if __name__ == "__main__":
    main()
