"""How long a dataset takes to be ready, extrapolated from a run of `flame-train cache` on fewer images.

    python scripts/many_images.py FOLDER [--images 300] [--total 10000] [--set model.vae_precision=bf16] [--device cuda]

Writes SDXL with random weights (`random_checkpoint.py`, or takes `--base FILE`) and drawn JPEGs of a photograph's size,
2048 x 1365 and about a megabyte, each with a caption of its own, into FOLDER. Then it runs the command in a process of
its own, with nothing encoded, and says where the time goes: reading the dataset, which decodes each image; captions;
images, which are decoded once more, scaled, encoded and written. What an entry costs is taken from the second half of
each part, where all is compiled and captured, and the rest of the run is counted once. What one core takes to decode
and scale an image says how many cores keep up with the device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from full_run import config
from PIL import Image

from flame_train.data.buckets import BucketRule, resize_and_crop
from flame_train.data.images import load_image

HEIGHT, WIDTH, RESOLUTION = 1365, 2048, 1024
_WATCHED = """
import atexit, contextlib, json, sys, time
begin, marks = time.perf_counter(), {"plan": [], "encoding captions": [], "encoding images": []}
now = lambda: time.perf_counter() - begin
from flame_train.run import encode, plan
planned, usual = plan.make_plan, encode.progress
def make_plan(*arguments):
    start = now()
    made = planned(*arguments)
    marks["plan"] = [[0, start], [len(made.samples.rows), now()]]
    return made
@contextlib.contextmanager
def progress(what, *rest):
    done = marks[what] = [[0, now()]]
    with usual(what, *rest) as advance:
        def noted(more):
            advance(more)
            done.append([done[-1][0] + more, now()])
        yield noted
plan.make_plan, encode.progress = make_plan, progress
atexit.register(lambda: print("\\n" + json.dumps({"marks": marks, "whole": now()}), file=sys.stderr))
from flame_train.cli import main
main()
"""


def draw(folder: Path, count: int) -> None:
    """JPEGs of waves with noise, of about a megabyte, and their captions."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    noise = np.random.default_rng(0).normal(0, 12, (HEIGHT, WIDTH, 3)).astype(np.float32)

    def one(i: int) -> None:
        wave = 127 + 100 * np.sin(columns / (20 + i % 40)) * np.cos(rows / (31 + i % 50))
        pixels = np.clip(wave[..., None] + np.roll(noise, i, 0), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:05}.jpg", quality=90)
        (folder / f"{i:05}.txt").write_text(f"a photograph of waves, number {i}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, range(count)))


def on_one_core(folder: Path) -> float:
    """Seconds of one core for an image that is read, decoded and scaled."""
    files = sorted(folder.glob("*.jpg"))[:8]
    begin = time.process_time()
    for file in files:
        pixels, info = load_image(file)
        resize_and_crop(pixels, BucketRule(RESOLUTION).assign(info.size))
    return (time.process_time() - begin) / len(files)


def each(marks: list[list[float]]) -> float:
    """Seconds an entry, of the second half of what was done."""
    if len(marks) < 2:
        return 0.0
    middle = next(mark for mark in marks if mark[0] >= marks[-1][0] / 2)
    if middle is marks[-1]:
        middle = marks[0]
    return (marks[-1][1] - middle[1]) / (marks[-1][0] - middle[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--total", type=int, default=10_000)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    args = parser.parse_args()
    folder, images = args.folder.resolve(), args.folder.resolve() / "images"
    base = (args.base or folder / "base.safetensors").resolve()
    if not base.exists():
        maker = Path(__file__).with_name("random_checkpoint.py")
        subprocess.run([sys.executable, str(maker), str(folder), "--device", args.device], check=True)
    draw(images, args.images)
    file = folder / "many.toml"
    file.write_text(config(base, images, folder / "run", 1))
    command = [sys.executable, "-c", _WATCHED, "cache", "--config", str(file), "--device", args.device]
    done = subprocess.run([*command, *(f"--set={o}" for o in args.overrides)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stderr)
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads(next(x for x in reversed(done.stderr.splitlines()) if x.startswith('{"marks"')))
    costs = {what: each(marks) for what, marks in told["marks"].items() if marks}
    for what, cost in costs.items():
        print(f"{what:<17} {cost * 1e3:8.2f} ms an item")
    alone = on_one_core(images)
    print(f"one core decodes and scales an image in {alone * 1e3:.1f} ms; there are {os.cpu_count()} cores")
    whole, more = told["whole"], sum(costs.values()) * (args.total - args.images)
    print(f"{args.images} images with captions: {whole:.1f} s; {args.total}, extrapolated: {whole + more:.0f} s")


if __name__ == "__main__":
    main()
