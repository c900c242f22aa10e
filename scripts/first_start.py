"""The first start on a machine: from the command to the first step, with nothing compiled, and where the time goes.

    python scripts/first_start.py FOLDER [--model sdxl] [--images 12] [--ranks 2] [--device cuda]

Writes a checkpoint of random weights (`random_checkpoint.py`) and drawn images into FOLDER, then trains two steps three
times in processes of their own: with empty caches of kernels and nothing encoded, with kernels and nothing encoded, and
with everything there. Of each: seconds from the command to the first step's line in the log, and seconds spent
in NVRTC, in cuDNN's plans and in cuBLASLt's choices, which may overlap, with the second at which each was begun first
and the one at which it was done last. What waits for what is seen there. `--images` says how many are encoded. With
`--ranks` the last two are done once more by so many processes, whose parts are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from full_run import COMMANDS, config, draw

_WATCHED = """
import atexit, json, sys, threading, time
begin, spent, lock = time.perf_counter(), {}, threading.Lock()
def watch(owner, name, what):
    usual = getattr(owner, name)
    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return usual(*args, **kwargs)
        finally:
            with lock:
                count, seconds, first, _ = spent.get(what, (0, 0.0, start - begin, 0.0))
                now = time.perf_counter()
                spent[what] = count + 1, seconds + now - start, min(first, start - begin), now - begin
    setattr(owner, name, timed)
from flame_train.engine.backend.cuda import cubin, nvrtc
from flame_train.engine.backend.cuda.libraries import cublaslt, cudnn
watch(nvrtc.KernelModules, "_of_text", "generated kernels, on all threads")
watch(nvrtc.KernelModules, "_of_file", "kernels of files, on all threads")
watch(nvrtc.MadeOnce, "of", "kernels, waited for or made, on all threads")
watch(cubin.Cubins, "_loaded", "kernels for sm_90a, on all threads")
watch(cudnn.CuDnn, "_make", "cuDNN's plans")
watch(cublaslt.CublasLt, "_choose", "cuBLASLt's algorithms")
from flame_train.run.commands import stages
from flame_train.run.encode import encode
from flame_train.run.plan import encoding, plan
from flame_train.run.train import train_run
watch(plan, "check", "stage: check")
watch(plan, "make_plan", "stage: plan")
watch(stages, "predict_ahead", "prediction, on a thread")
watch(encoding.Encoding, "keys", "hashes of networks")
watch(stages, "encode", "stage: encode")
watch(encode, "_encode_captions", "captions encoded")
watch(encode, "_encode_images", "images encoded")
watch(encode, "load_encoders", "text encoders loaded")
watch(train_run, "load_networks", "denoiser loaded")
from flame_train.networks import fixed_batch
watch(fixed_batch._Program, "start", "encoders' batches begun, with their first runs and captures")
watch(stages, "train_run", "stage: train")
atexit.register(lambda: print("\\n" + json.dumps({"whole": time.perf_counter() - begin, **spent}), file=sys.stderr))
from flame_train.cli import main
main()
"""


def start(folder: Path, file: Path, args: argparse.Namespace, name: str, ranks: int = 1) -> float:
    """Trains two steps in processes of their own. Prints and returns the seconds until the first was done."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "CUPY_CACHE_DIR": str(folder / "cache" / "cupy")}
    how = ["-c", _WATCHED] if ranks == 1 else ["-m", "flame_train"]
    command = [sys.executable, *how, COMMANDS[args.model], "--config", str(file), "--device", args.device]
    command += ["--gpus", str(ranks)] if ranks > 1 else []
    said, log, first = folder / "said.txt", out / "log.jsonl", 0.0
    begin = time.monotonic()
    with (
        said.open("w") as file_said,
        subprocess.Popen(command, env={**os.environ, **caches}, stdout=subprocess.DEVNULL, stderr=file_said) as process,
    ):
        while process.poll() is None:
            if not first and log.exists() and log.stat().st_size:
                first = time.monotonic() - begin
            time.sleep(0.02)
    print(f"{name}: first step after {first:.1f} s, all in {time.monotonic() - begin:.1f} s", flush=True)
    lines = said.read_text().splitlines()
    if process.returncode:
        print("\n".join(lines[-20:]))
        sys.exit(process.returncode)
    told = next((line for line in reversed(lines) if line.startswith('{"whole"')), "{}")
    for what, spent in json.loads(told).items():
        if isinstance(spent, list):
            count, seconds, first, last = spent
            print(f"    {seconds:8.2f} s {count:6d} times, from {first:6.2f} to {last:6.2f}  {what}")
    sys.stdout.flush()
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="sdxl", choices=[*COMMANDS])
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "base.safetensors").exists():
        maker = Path(__file__).with_name("random_checkpoint.py")
        made = [sys.executable, str(maker), str(folder), "--model", args.model, "--device", args.device]
        subprocess.run(made, check=True)
    draw(folder / "images", args.images)
    file = folder / "first.toml"
    text = config(folder / "base.safetensors", folder / "images", folder / "run", 2)
    file.write_text(text.replace("every = 1", "every = 0"))
    shutil.rmtree(folder / "cache", ignore_errors=True)
    encoded = folder / "images" / ".flame-cache"
    for name in ("no kernels, nothing encoded", "kernels, nothing encoded"):
        shutil.rmtree(encoded, ignore_errors=True)
        alone = start(folder, file, args, name)
    there = start(folder, file, args, "everything there")
    if args.ranks > 1:
        together = start(folder, file, args, f"everything there, {args.ranks} processes", args.ranks)
        shutil.rmtree(encoded, ignore_errors=True)
        cold = start(folder, file, args, f"nothing encoded, {args.ranks} processes", args.ranks)
        print(f"later than with one process: {together - there:.1f} s, and {cold - alone:.1f} s where all encode")


if __name__ == "__main__":
    main()
