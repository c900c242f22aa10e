"""The whole program at full size on a GPU, on random weights: every command a user gives, and the memory it foretold.

    python scripts/full_run.py FOLDER [--model flux-dev] [--steps 12] [--kill] [--set KEY=VALUE ...]

Writes a checkpoint (`random_checkpoint.py`) and twelve drawn images into FOLDER, trains on them with a preview at the
beginning, half way and at the end, and prints what `--dry-run` predicted beside what the run took. With random weights
the previews show nothing. `--kill` trains once more, with a SIGKILL after the first checkpoint and the same command
again, and compares the two LoRAs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from kill_and_continue import IGNORED
from lora_differences import differences
from PIL import Image

from flame_train.data.clip_files import times, webp
from flame_train.families import usual_keys
from flame_train.models.registry import FAMILIES, family_of

COMMANDS = {size: family.command for family in FAMILIES.values() for size in family.published if size != family.small}
"""A published size -> the command that trains it."""


def draw(folder: Path, count: int, seed: int = 0) -> None:
    """Images of 1024 x 1024 with a disc each, and their captions."""
    folder.mkdir(exist_ok=True)
    rows, columns = np.mgrid[:1024, :1024]
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = np.broadcast_to(rng.integers(0, 255, 3, np.uint8), (1024, 1024, 3)).copy()
        pixels[np.hypot(rows - rng.integers(300, 700), columns - rng.integers(300, 700)) < 200] = rng.integers(
            0, 255, 3
        )
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.txt").write_text(f"a disc, image {i}")


def draw_clips(folder: Path, count: int, frames: int = 33) -> None:
    """Clips of 832 x 480 in which a disc moves to the right, and their captions."""
    folder.mkdir(exist_ok=True)
    rows, columns = np.mgrid[:480, :832]
    for i in range(count):
        clip = np.full((frames, 480, 832, 3), 20 * i % 256, np.uint8)
        for number, frame in enumerate(clip):
            frame[np.hypot(rows - 200, columns - 150 - 12 * number) < 80] = (220, 30 * i % 256, 60)
        (folder / f"{i:02}.webp").write_bytes(webp(clip, times(frames, 24)))
        (folder / f"{i:02}.txt").write_text(f"a disc moves to the right, clip {i}")


def usual_side(base: Path) -> int:
    """The side of the images that a checkpoint's family is trained with, in pixels."""
    side: int = usual_keys(family_of(base).name).get("data.resolution", 1024)
    return side


def config(base: Path, images: Path, out: Path, steps: int) -> str:
    return f"""
[model]
checkpoint = "{base}"
[data]
path = "{images}"
resolution = {usual_side(base)}
[lora]
targets = ["attention"]
[train]
steps = {steps}
[checkpoint]
every = {max(1, steps // 2)}
[sample]
every = {max(1, steps // 2)}
prompts = ["a disc"]
steps = 4
[output]
dir = "{out}"
"""


def flame(*argv: str) -> str:
    """Runs a command of the program; its output. Ends with it if it fails."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "flame_train", *argv], stdout=subprocess.PIPE, text=True)
    print(f"{time.monotonic() - begin:.1f} s: flame-train {' '.join(argv)}", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def compared(command: list[str], folder: Path) -> str:
    """Trains in another run folder, killed after its first checkpoint and continued. Says how the LoRAs differ."""
    cut = folder / "cut"
    again = [*command, f"--set=output.dir={cut}"]
    with (folder / "cut.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "flame_train", *again], stdout=log, stderr=log)
        while process.poll() is None and not any(cut.glob("checkpoints/step-*")):
            time.sleep(0.05)
        process.kill()
        process.wait()
    flame(*again)
    found = differences(folder / "run" / "lora.safetensors", cut / "lora.safetensors", IGNORED)
    return f"{len(found)} differences: {found[0]}" if found else "same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="flux-dev", choices=[*COMMANDS])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--clips", action="store_true", help="train on clips of 33 frames; see data.frames")
    parser.add_argument("--kill", action="store_true", help="train again, killed and continued, and compare")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "base.safetensors").exists():
        maker = Path(__file__).with_name("random_checkpoint.py")
        subprocess.run(
            [sys.executable, str(maker), str(folder), "--model", args.model, "--device", args.device], check=True
        )
    if args.clips:
        draw_clips(folder / "images", 6)
    else:
        draw(folder / "images", 12)
    file = folder / "run.toml"
    file.write_text(config(folder / "base.safetensors", folder / "images", folder / "run", args.steps))
    command = [
        COMMANDS[args.model],
        "--config",
        str(file),
        "--device",
        args.device,
        *(f"--set={o}" for o in args.overrides),
    ]
    predicted = json.loads(flame(*command, "--dry-run", "--json"))["predicted_memory_gib"]
    flame(*command)
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    before, took = (round(lines[i]["memory"] / 2**30, 2) for i in (args.steps // 2 - 1, -1))
    found = {"last step": lines[-1], "predicted GiB": predicted, "took GiB": took, "before half way GiB": before}
    print(json.dumps(found, indent=1), flush=True)
    if args.kill:
        came = compared(command, folder)
        print(f"killed and continued: {came}")
        sys.exit(came != "same")


if __name__ == "__main__":
    main()
