"""A very small SDXL, six drawings, and the program run on them: what every test of faults begins with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train.config.render import toml_value
from tests.run_files import log_of
from tests.tiny_sdxl import write_tiny_sdxl

ROOT = Path(__file__).parents[2]
TIMINGS = ("images_per_s", "data_wait_ms", "memory")
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    seconds: float
    stdout: str
    stderr: str

    @property
    def early_stop_message(self) -> str:
        """The last line, of a program that was asked to stop; fails if it complained."""
        assert "Traceback" not in self.stderr + self.stdout
        assert "error: " not in self.stderr, self.stderr
        return self.stderr.splitlines()[-1]

    @property
    def complaint(self) -> str:
        """The error line and what belongs to it; fails unless there is exactly one, and no traceback."""
        assert sum(line.startswith("error: ") for line in self.stderr.splitlines()) == 1, self.stderr
        assert "Traceback" not in self.stderr + self.stdout
        assert "bug in flame-train" not in self.stderr
        return self.stderr[f"\n{self.stderr}".index("\nerror: ") :]


ARMED = """
import json, resource, sys
from flame_train import cli
from flame_train.disk import failpoint
points, limits = json.loads(sys.argv.pop(1))
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
failpoint.arm(points)
cli.main()
"""
"""The program with failpoints armed, which it cannot do by itself, and with limits of the system."""


class Program:
    """The command line. `__call__` and `start` fork a process that has its imports; `cold` begins a new one."""

    def __init__(self, forked: list[str]) -> None:
        self.forked = forked

    def __call__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        kill_after: float | None = None,
        limits: Mapping[str, int] | None = None,
        cwd: Path = ROOT,
        failpoint: str = "",
    ) -> Ended:
        asked, begin = json.dumps([failpoint, limits or {}]), time.monotonic()
        process = self._begun([*self.forked, "-c", ARMED, asked, *arguments], env, cwd)
        try:
            out, err = process.communicate(timeout=kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        return Ended(process.returncode, time.monotonic() - begin, out, err)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> subprocess.Popen[str]:
        """A process of its own, just begun."""
        return self._begun([*self.forked, "-m", "flame_train", *arguments], env, cwd)

    def start_python(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        """Another Python with these arguments."""
        return self._begun([sys.executable, *arguments], env, cwd, pass_fds)

    @staticmethod
    def _begun(
        command: list[str], env: Mapping[str, str] | None, cwd: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=cwd,
            text=True,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | dict(env or {}),
            preexec_fn=_heed_signals,
        )

    def cold(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Ended:
        """As a user runs it: a new interpreter."""
        process = self.start_python("-m", "flame_train", *arguments, env=env, cwd=cwd)
        out, err = process.communicate()
        return Ended(process.returncode, 0.0, out, err)


def _heed_signals() -> None:
    """As a terminal's processes do: whatever started the tests may ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def program(forked: list[str]) -> Program:
    return Program(forked)


def draw(path: Path, height: int, width: int, seed: int) -> None:
    """A drawing with its caption."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (5 + seed) + y / (9 - c) + seed) for c in range(3)]
    Image.fromarray(np.rint(127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)).save(path)
    path.with_suffix(".txt").write_text(f"drawing number {seed}", encoding="utf-8")


def draw_all(folder: Path) -> None:
    """Six drawings of two shapes."""
    folder.mkdir()
    for i in range(6):
        draw(folder / f"{i}.png", *((64, 96) if i in (2, 4) else (64, 64)), seed=i)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base.safetensors` and `drawings/`, for tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("world")
    write_tiny_sdxl(folder / "base.safetensors", blocks=1)
    draw_all(folder / "drawings")
    return folder


SETTINGS: dict[str, Any] = {
    "data.resolution": 64,
    "data.bucket_step": 16,
    "data.batch_size": 2,
    "data.caption_dropout": 0.3,
    "lora.rank": 2,
    "lora.alpha": 2.0,
    "lora.targets": ["output_blocks.1.*.attn*"],  # near the end: no backward pass goes further
    "optimizer.lr": 1e-2,
    "schedule.warmup_steps": 2,
    "gradient.accumulation": 2,
    "gradient.clip_norm": 0.03,
    "gradient.clip_value": 0.02,
    "gradient.noise_std": 1e-3,
    "loss.weighting": "min_snr",
    "loss.snr_gamma": 5.0,
    "loss.offset_noise": 0.05,
    "train.steps": 5,
    "train.precision": "fp32",
    "checkpoint.every": 2,
    "sample.every": 0,
}
"""With everything on that a continued run could lose: accumulation, dropout, noise, moments, a moving rate."""


@dataclass(frozen=True)
class Job:
    """A training run with a folder of its own: config, cache and output."""

    program: Program
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def arguments(self, command: str, **changes: Any) -> list[str]:
        """The command line; `changes` are settings with `__` for the dot."""
        path = self.folder / "config.toml"
        settings = self.settings | {key.replace("__", "."): value for key, value in changes.items()}
        path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items()))
        return [command, "--config", str(path), "--device", "cpu"]

    def train(self, failpoint: str = "", kill_after: float | None = None, limits: Any = None, **changes: Any) -> Ended:
        """Runs to the end, or to where it is made to stop."""
        arguments = self.arguments("sdxl-lora", **changes)
        return self.program(*arguments, failpoint=failpoint, kill_after=kill_after, limits=limits)

    def plan(self, command: str = "sdxl-lora", **changes: Any) -> Ended:
        """Says what would be done."""
        return self.program(*self.arguments(command, **changes), "--dry-run", "--json")

    def fill_cache(self, failpoint: str = "", **changes: Any) -> Ended:
        return self.program(*self.arguments("cache", **changes), "--json", failpoint=failpoint)

    def finish(self, **changes: Any) -> Result:
        """Runs to the end, which must be reached."""
        ended = self.train(**changes)
        assert ended.code == 0, ended.stderr
        return self.result()

    def result(self) -> Result:
        status = self.status()
        assert (status["state"], status["exit_code"]) == ("done", 0)
        newest = max((self.out / "checkpoints").glob("step-*"))
        return Result(
            digest(self.out / "lora.safetensors"),
            {path.name: digest(path) for path in sorted(newest.iterdir())},
            self.log(),
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "status.json").read_text())
        return found

    def log(self) -> list[dict[str, Any]]:
        """The log without what depends on the clock and on the machine."""
        lines = log_of(self.out)
        return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints and of anything that looks like one."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.out / "checkpoints").glob("step-*"))

    def debris(self) -> list[str]:
        """What half-done work left behind."""
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob(".*") if p.name != ".lock")


@dataclass(frozen=True)
class Result:
    """What two runs must have in common to the byte."""

    lora: str
    checkpoint: dict[str, str]
    log: list[dict[str, Any]]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_job(program: Program, folder: Path, world: Path, **changes: Any) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model.checkpoint": str(world / "base.safetensors"),
        "data.path": str(world / "drawings"),
        "data.cache": str(folder / "cache"),
        "output.dir": str(folder / "out"),
        **SETTINGS,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return Job(program, folder, settings)


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed: what it gave, how long it took, its folder, and the cache it filled."""

    result: Result
    seconds: float
    out: Path
    cache: Path


@pytest.fixture(scope="session")
def undisturbed(program: Program, tmp_path_factory: pytest.TempPathFactory, world: Path) -> Whole:
    done = make_job(program, tmp_path_factory.mktemp("whole"), world)
    ended = done.train()
    assert ended.code == 0, ended.stderr
    return Whole(done.result(), ended.seconds, done.out, done.cache)


@pytest.fixture
def new_job(program: Program, tmp_path: Path, world: Path) -> Job:
    """A run that was not begun, nothing cached."""
    return make_job(program, tmp_path, world)


@pytest.fixture
def job(new_job: Job, undisturbed: Whole) -> Job:
    """A run that was not begun, everything cached."""
    shutil.copytree(undisturbed.cache, new_job.cache)
    return new_job


@pytest.fixture
def finished(job: Job, undisturbed: Whole) -> Job:
    """A run that is done."""
    shutil.copytree(undisturbed.out, job.out)
    return job


@pytest.fixture(scope="session")
def killed_run(program: Program, tmp_path_factory: pytest.TempPathFactory, world: Path, undisturbed: Whole) -> Path:
    """The folder of a run that was killed after step 3, one after its checkpoint. Not to be written to."""
    killed = make_job(program, tmp_path_factory.mktemp("killed"), world)
    shutil.copytree(undisturbed.cache, killed.cache)
    assert killed.train(failpoint="train.after_step:3").code == -signal.SIGKILL
    return killed.out


@pytest.fixture
def begin_killed(killed_run: Path) -> Callable[[Job], None]:
    """begin_killed(job): its folder is that of a run that was killed after step 3."""

    def begin(job: Job) -> None:
        shutil.copytree(killed_run, job.out)

    return begin


@pytest.fixture
def another(program: Program, tmp_path: Path, world: Path, undisturbed: Whole) -> Callable[..., Job]:
    """another(name, **changes): one more run that was not begun, everything of the usual settings cached."""

    def make(name: str, **changes: Any) -> Job:
        made = make_job(program, tmp_path / name, world, **changes)
        shutil.copytree(undisturbed.cache, made.cache)
        return made

    return make


@pytest.fixture
def whole(undisturbed: Whole) -> Result:
    """What an uninterrupted run of `job` gives."""
    return undisturbed.result


@pytest.fixture
def seconds(undisturbed: Whole) -> float:
    """How long an uninterrupted run takes, so that kills can be spread over it."""
    return undisturbed.seconds


@pytest.fixture
def own(job, world):
    """A run whose drawings and checkpoint are its own, to be changed; everything is cached."""
    shutil.copytree(world / "drawings", job.folder / "drawings")
    shutil.copy(world / "base.safetensors", job.folder / "base.safetensors")
    job.settings.update(
        {"data.path": str(job.folder / "drawings"), "model.checkpoint": str(job.folder / "base.safetensors")}
    )
    return job
