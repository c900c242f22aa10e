"""What others wrote and this program reads back, as kinds of `files.py`: packed weights, sweeps, imports, runs.

Each has numbers and texts that are used for something: a count, a step, a name of a file, a line for Slurm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
from files import LINE, Kind, command

from flame_train.engine.dtype import Array
from flame_train.errors import ModelFileError
from flame_train.io.runstatus import state_of
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.run.commands.reproduce import Written
from flame_train.show.report import Report
from flame_train.sweep.on_slurm import script
from flame_train.sweep.plan import read_sweep

SETTINGS = {"train": {"steps": 4}, "optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}, "model": {"prediction": "epsilon"}}
STATE = {"blocksize": 64, "shape": [32, 32], "dtype": "bfloat16", "quant_type": "nf4"}
SWEEP = """\
config = "config.toml"
folder = "runs"
slurm = ["--time=1:00:00", "--partition=gpu"]
[grid]
"optimizer.lr" = [1e-4, 2e-4]
"train.steps" = [4, 8]
"""
CONFIG = """\
format = 1
[model]
checkpoint = "base.safetensors"
[data]
path = "images"
control = ["images"]
[sample]
every = 2
prompts = ["a cat", {text = "a dog", width = 64}]
[train]
steps = 4
[output]
dir = "run"
"""
JOB = """\
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      model: {name_or_path: base.safetensors, arch: sdxl}
      network: {type: lora, linear: 4, linear_alpha: 4}
      datasets:
        - {folder_path: images, resolution: [512, 768], caption_dropout_rate: 0.05}
      train: {steps: 100, lr: 1e-4, batch_size: 1, optimizer: adamw8bit, dtype: bf16}
      sample: {prompts: ["a cat"], width: 64, sample_every: 50}
      save: {save_every: 50, dtype: float16}
"""
ROW = {"file": "a.png", "original": "200x100", "resized": "128x64", "bucket": "64x64", "crop": {"left": 0, "top": 0}}
BEGIN = "---- "
FILES = {
    "log.jsonl": "".join(
        json.dumps({"step": n, "loss": 0.5, "lr": 1e-4, "validation": {"loss": 0.2, "bands": {"0-500": 0.3}}}) + "\n"
        for n in range(1, 5)
    ),
    "status.json": json.dumps({"state": "interrupted", "step": 4, "pid": 9, "host": "x", "steps_per_s": 2.0}),
    "dataset.json": json.dumps([ROW | {"captions": ["a cat"], "mask": "m.png"}]),
    "images.json": json.dumps(
        {
            "images": [{"file": "a.png", "relative_loss": 1.0, "seen": 4}],
            "bands": [{"levels": "0-50", "loss": 0.4, "samples": 2}],
        }
    ),
    "config.toml": CONFIG,
}


def gguf(path: Path) -> bytes:
    """Keys of several kinds, a vocabulary, and two tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("flux"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("comfy.gguf.orig_shape.a") + struct.pack("<IIQ2q", 9, 11, 2, 2, 4),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") * 3,
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
    ]
    tensors = [text(n) + struct.pack("<IQIQ", 1, 8, 0, 32 * i) for i, n in enumerate("ab")]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32) + bytes(64)


def packed(path: Path) -> bytes:
    """A tensor of bitsandbytes, and one in ComfyUI's 8 bits."""
    arrays = {
        "x.weight": np.zeros((512, 1), np.uint8),
        "x.weight.absmax": np.ones(16, np.float32),
        "x.weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        "x.weight.quant_state.bitsandbytes__nf4": _bytes(STATE),
        "a.weight": np.zeros((6, 256), np.int8),
        "a.weight_scale": np.ones(1, np.float32),
        "a.comfy_quant": _bytes({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}),
    }
    said = {"layers": {"a": {"format": "int8_tensorwise"}}}
    save_file(path, arrays, {"_quantization_metadata": json.dumps(said)})
    return path.read_bytes()


def read_packed(path: Path) -> None:
    """Every tensor, and what `inspect` says of them."""
    with open_weights(path) as file:
        for name in file.names:
            file.read(name)
    command(["inspect", str(path), "--json"], (0, 3))


def settings(path: Path) -> bytes:
    """The settings in a LoRA's metadata, with the LoRA beside them."""
    return json.dumps(SETTINGS).encode()


def read_settings(path: Path) -> None:
    """What `reproduce` takes from a LoRA whose settings have their right hash."""
    said = path.read_bytes().decode(errors="replace")
    lora = path.with_name("l.safetensors")
    own = {"flame_train_config": said, "flame_train_config_hash": hashlib.sha256(said.encode()).hexdigest()}
    arrays = {"a.lora_down.weight": np.ones((2, 4), np.float32), "a.lora_up.weight": np.ones((4, 2), np.float32)}
    save_file(lora, arrays, own | {"flame_train_dataset_hash": "0", "ss_steps": said[:20], "ss_network_dim": said[:9]})
    command(["inspect", str(lora)], (0, 3))
    with contextlib.suppress(ModelFileError):
        Written.read(lora)


def sweep(path: Path) -> bytes:
    """A grid, and the config beside it."""
    path.with_name("config.toml").write_text(CONFIG)
    return SWEEP.encode()


def read_sweeps(path: Path) -> None:
    """The table of runs, and the script of an array, of which no text of the file becomes a line."""
    command(["sweep", str(path), "--status", "--device", "cpu"], (0, 2))
    made = script(read_sweep(path), "cuda")
    if LINE.strip() in made.splitlines():
        raise AssertionError(f"a line of the sweep's file is one of the script: {made!r}")


def run(path: Path) -> bytes:
    """The files of a run, one below the other."""
    return "".join(f"{BEGIN}{name}\n{content}\n" for name, content in FILES.items()).encode()


def read_run(path: Path) -> None:
    """The page of a run as it is written beside its checkpoints, and what a sweep's table reads of it."""
    folder = path.with_name("run")
    folder.mkdir(exist_ok=True)
    _, *parts = path.read_bytes().split(BEGIN.encode())
    for part in parts:
        name, _, content = part.partition(b"\n")
        if name.decode(errors="replace") in FILES:
            (folder / name.decode()).write_bytes(content)
    Report(folder).make()
    state_of(folder)


def job(path: Path) -> bytes:
    """A job of ai-toolkit."""
    return JOB.encode()


def read_job(path: Path) -> None:
    """What `import` makes of it."""
    command(["import", str(path), "-o", str(path.with_name("out.toml")), "--force"], (0, 2))


def _bytes(value: object) -> Array:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


KINDS = {
    "ggufs": Kind("x.gguf", gguf, read_packed),
    "packed": Kind("x.safetensors", packed, read_packed),
    "recorded": Kind("settings.json", settings, read_settings),
    "sweeps": Kind("s.toml", sweep, read_sweeps),
    "jobs": Kind("job.yaml", job, read_job),
    "runs": Kind("files.txt", run, read_run),
}
