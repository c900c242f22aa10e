"""The first start on a machine: from the command to the first step, with nothing compiled, and where the time goes.

    python scripts/first_start.py FOLDER [--model sdxl] [--images 12]

Writes a checkpoint of random weights (`random_checkpoint.py`) and drawn images into FOLDER, then trains two steps three
times in processes of their own: with empty caches of kernels and nothing encoded, with kernels and nothing encoded, and
with everything there. Of each: seconds from the command to the first step's line in the log, and seconds spent
in NVRTC, in cuDNN's plans and in cuBLASLt's choices, which may overlap, with the second at which each was begun first
and the one at which it was done last. What waits for what is seen there. `--images` says how many are encoded.
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


def start(folder: Path, file: Path, model: str, name: str) -> None:
    """Trains two steps in a process of its own, and prints when the first was done."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "CUPY_CACHE_DIR": str(folder / "cache" / "cupy")}
    command = [sys.executable, "-c", _WATCHED, COMMANDS[model], "--config", str(file)]
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
    for what, spent in json.loads(next(line for line in reversed(lines) if line.startswith('{"whole"'))).items():
        if isinstance(spent, list):
            count, seconds, first, last = spent
            print(f"    {seconds:8.2f} s {count:6d} times, from {first:6.2f} to {last:6.2f}  {what}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="sdxl", choices=[*COMMANDS])
    parser.add_argument("--images", type=int, default=12)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "base.safetensors").exists():
        maker = Path(__file__).with_name("random_checkpoint.py")
        subprocess.run([sys.executable, str(maker), str(folder), "--model", args.model], check=True)
    draw(folder / "images", args.images)
    file = folder / "first.toml"
    text = config(folder / "base.safetensors", folder / "images", folder / "run", 2)
    file.write_text(text.replace("every = 1", "every = 0"))
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for name in ("no kernels, nothing encoded", "kernels, nothing encoded"):
        shutil.rmtree(folder / "images" / ".flame-cache", ignore_errors=True)
        start(folder, file, args.model, name)
    start(folder, file, args.model, "everything there")


if __name__ == "__main__":
    main()
