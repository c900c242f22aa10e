"""Runs of several processes on this machine's CPUs, started by mpirun as a user would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train.config.render import toml_value
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.registry import FAMILIES
from tests.tiny_sdxl import write_tiny_sdxl

MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
ENVIRON = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as many threads as processes
OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")

SETTINGS: dict[str, Any] = {
    "data.resolution": 64,
    "data.bucket_step": 32,
    "data.batch_size": 2,
    "data.caption_dropout": 0.3,
    "lora.rank": 2,
    "optimizer.lr": 1e-3,
    "gradient.clip_norm": 0.05,
    "gradient.noise_std": 1e-3,
    "gradient.checkpointing": "full",
    "train.ema_decay": 0.9,
    "train.precision": "fp32",
    "checkpoint.every": 4,
    "sample.every": 0,
    "output.precision": "fp32",
}
"""With everything on that several processes could do in another way than one."""


@dataclass(frozen=True)
class Study:
    """One small base model and its images, and runs on them."""

    folder: Path
    base: Path
    python: list[str]
    settings: dict[str, Any] = field(default_factory=dict)

    def cold(self) -> Study:
        """The same in processes that begin as a user's do: they are the launcher's own, by number and environment."""
        return replace(self, python=[sys.executable])

    def command(self, name: str, **changes: Any) -> list[str]:
        """The command of the run called so; `changes` are settings with `__` for the dot."""
        settings = {
            "model.checkpoint": str(self.base),
            "data.path": str(self.folder / "drawings"),
            "data.cache": str(self.folder / "cache"),
            "output.dir": str(self.folder / name),
            **SETTINGS,
            **self.settings,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        config = self.folder / f"{name}-{len(list(self.folder.glob('*.toml')))}.toml"
        config.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items()))
        return [*self.python, "-m", "flame_train", "train", "--config", str(config), "--device", "cpu"]

    def start(self, name: str, ranks: int, **changes: Any) -> subprocess.Popen[str]:
        command = self.command(name, **changes)
        if ranks > 1:
            assert MPIRUN is not None
            command = [MPIRUN, *OPEN_MPI, "-n", str(ranks), *command]
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRON)

    def run(self, name: str, ranks: int, **changes: Any) -> tuple[int, str]:
        """Its exit status and what it said."""
        process = self.start(name, ranks, **changes)
        out, err = process.communicate()
        return process.returncode, out + err

    def scripted(self, name: str, ranks: int, script: str, **changes: Any) -> tuple[int, str]:
        """The same in processes that run `script` before the command: its exit status and what it said."""
        arguments = self.command(name, **changes)[len(self.python) + 2 :]
        whole = f"{script}\nfrom flame_train.cli import main\nmain()\n"
        assert MPIRUN is not None
        ended = subprocess.run(
            [MPIRUN, *OPEN_MPI, "-n", str(ranks), *self.python, "-c", whole, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRON,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def finish(self, name: str, ranks: int, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Runs to the end, which must be reached; the LoRA's tensors."""
        code, said = self.run(name, ranks, **changes)
        assert code == 0, said
        return self.lora(name)

    def lora(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        with SafetensorsFile(self.folder / name / "lora.safetensors") as file:
            return {tensor: np.array(file.read(tensor)) for tensor in file.names}

    def losses(self, name: str) -> list[float]:
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


def draw(folder: Path) -> None:
    """Seven drawings of two shapes: five and two, so that the last batches are filled up."""
    folder.mkdir()
    for seed in range(7):
        height, width = (64, 96) if seed in (2, 4) else (64, 64)
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.sin(x / (5 + seed) + y / (9 - c) + seed) for c in range(3)]
        pixels = np.rint(127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")
        (folder / f"{seed}.txt").write_text(f"drawing number {seed}", encoding="utf-8")


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory, forked: list[str]) -> Any:
    """study(family): the runs of a family on its small base model."""
    if MPIRUN is None:
        pytest.skip("needs mpirun: pip install 'flame-train[multi]'")
    made: dict[str, Study] = {}

    def of(family: str) -> Study:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            draw(folder / "drawings")
            if family == "sdxl":
                write_tiny_sdxl(folder / "base.safetensors", 3)
            else:
                FAMILIES[family].write_small_base(folder, 3)
            made[family] = Study(folder, folder / "base.safetensors", forked)
        return made[family]

    return of
