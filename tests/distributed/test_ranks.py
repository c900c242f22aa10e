"""Several processes train what one does with as many times the accumulation; and they end together."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from flame_train import cli

from .conftest import MPIRUN, OPEN_MPI, Study

STEPS = 50
WITHIN = 1e-5  # of a tensor's largest value
SAMPLES_OWN = {"loss__contrastive_scale": [2.0, 4.0], "loss__contrastive_schedule": "sigma", "lora__min_rank": 1}


def farthest(a, b) -> float:
    """The largest difference of two LoRAs, in terms of each tensor's largest value."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[n] - b[n]).max() / max(np.abs(a[n]).max(), 1e-30)) for n in a)


def wait_for(found, process) -> None:
    """Until `found()` is true or the process ends."""
    while not found() and process.poll() is None:
        time.sleep(0.01)  # a poll of another process's files; nothing else says that they are there


def processes_of(launcher: int) -> list[int]:
    """The ranks that a launcher started, in no order."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child.pid for child in children if "flame_train" in child.cmdline()]


def saved(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def whole(family: str) -> object:
    """A family with all steps and numbers of processes, where proofs are asked for."""
    return pytest.param(family, STEPS, (2, 4), marks=[pytest.mark.proof, pytest.mark.timeout(3600)])


@pytest.mark.parametrize(
    ("family", "steps", "numbers"),
    [("sd3", 3, (2,)), whole("sdxl"), whole("sd3"), whole("flux")],
)
def test_several_processes_train_what_one_does_and_twice_the_same_bytes(study, family, steps, numbers):
    """Flux and the short run with contrastive guidance and masked ranks: each sample has its own scale and mask."""
    runs: Study = study(family)
    more = {"train__steps": steps} | (SAMPLES_OWN if family == "flux" or steps < STEPS else {})
    one = runs.finish(f"one-{steps}", 1, gradient__accumulation=4, **more)
    for ranks in numbers:
        name, micro_batches = f"of-{ranks}-{steps}", 4 // ranks
        several = runs.finish(name, ranks, gradient__accumulation=micro_batches, **more)
        assert farthest(one, several) < WITHIN
        np.testing.assert_allclose(runs.losses(name), runs.losses(f"one-{steps}"), rtol=1e-4)
    again = runs.cold().finish(f"again-{steps}", ranks, gradient__accumulation=micro_batches, **more)
    assert all((several[name] == again[name]).all() for name in several)


def test_the_cache_is_filled_by_all(study):
    runs: Study = study("sdxl")
    one = runs.finish("warm", 1, gradient__accumulation=2, train__steps=1)
    two = runs.finish("cold", 2, train__steps=1, data__cache=str(runs.folder / "another-cache"))
    assert farthest(one, two) < WITHIN
    assert len(list((runs.folder / "another-cache").rglob("*.safetensors"))) > 0


@pytest.mark.proof
def test_a_run_goes_on_with_another_number_of_processes(study):
    runs: Study = study("sdxl")
    constant = {"schedule__name": "constant", "schedule__warmup_steps": 0}  # so that a run may be prolonged
    whole = runs.finish("whole", 1, gradient__accumulation=4, train__steps=12, **constant)
    runs.finish("moved", 2, gradient__accumulation=2, train__steps=8, **constant)
    code, said = runs.run("moved", 3, gradient__accumulation=2, train__steps=12, **constant)
    assert code == 6
    assert "takes 4 micro-batches" in said
    assert "3 processes cannot share" in said
    code, said = runs.run("moved", 4, gradient__accumulation=2, train__steps=12, **constant)
    assert code == 0, said
    assert "an update takes 4 micro-batches, as the run began: 1 for each of 4 processes" in said
    assert farthest(whole, runs.lora("moved")) < WITHIN


def test_a_request_and_a_signal_to_one_process_reach_all(study):
    runs: Study = study("sdxl")
    grids = {"sample__every": 100_000, "sample__first": False, "sample__steps": 1, "sample__prompts": ["a", "b"]}
    process = runs.start("signalled", 2, train__steps=400, checkpoint__every=100_000, **grids)
    folder = runs.folder / "signalled"
    log = folder / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0, process)
    for kind in ("sample", "save"):
        assert cli.run(["ask", str(folder), kind]) == 0
    wait_for(lambda: list(folder.glob("samples/step-*.png")) and list(folder.glob("checkpoints/step-*")), process)
    os.kill(processes_of(process.pid)[-1], signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "saved; run the same command to continue" in said
    assert json.loads((runs.folder / "signalled" / "status.json").read_text())["state"] == "interrupted"
    assert saved(runs.folder / "signalled")


@pytest.mark.proof  # a signal instead of a kill is in every run
def test_a_killed_process_ends_all_and_the_run_goes_on_to_the_same_bytes(study):
    runs: Study = study("sdxl")
    whole = runs.finish("unkilled", 2, train__steps=16)
    process = runs.start("killed", 2, train__steps=16)
    wait_for(lambda: saved(runs.folder / "killed"), process)
    os.kill(random.choice(processes_of(process.pid)), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    continued = runs.finish("killed", 2, train__steps=16)
    assert all((whole[name] == continued[name]).all() for name in whole)


def test_processes_with_other_settings_are_refused_by_name(study):
    """Also with those that change no weight: they decide when processes meet."""
    runs: Study = study("sdxl")
    (runs.folder / "other-cache").mkdir()
    (runs.folder / "cache").mkdir(exist_ok=True)
    unlike = {
        "optimizer__lr": 2e-3,
        "sample__every": 3,
        "checkpoint__every": 7,
        "data__cache": str(runs.folder / "other-cache"),
        "output__remote": "s3://nowhere/x",
    }
    mine, other = runs.command("unlike", train__steps=4), runs.command("unlike", train__steps=4, **unlike)
    ended = subprocess.run(
        [MPIRUN, *OPEN_MPI, "-n", "1", *mine, ":", "-n", "1", *other], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "rank 1: optimizer.lr: 0.002, rank 0 has 0.001" in ended.stderr
    assert all(f"rank 1: {key.replace('__', '.')}: " in ended.stderr for key in unlike)


def test_a_process_that_does_not_come_ends_all(study):
    """It sleeps in a callback, and goes on giving signs of life."""
    runs: Study = study("sdxl")
    script = """
import functools, time
from flame_train.distributed import watch
from flame_train.run.commands import stages
from flame_train.training.session import Callbacks
watch._STILL = 4.0
asleep = Callbacks(lambda record: time.sleep(600))
stages.train = functools.partial(stages.train, callbacks=asleep)
"""
    code, said = runs.scripted("asleep", 2, script, train__steps=8)
    assert code == 5, said
    assert "no process did anything for 4 s" in said


def test_figures_of_images_go_on_as_they_were(study):
    runs: Study = study("sdxl")
    runs.finish("watched", 2, train__steps=4, schedule__name="constant")
    runs.finish("paused", 2, train__steps=2, schedule__name="constant")
    runs.finish("paused", 2, train__steps=4, schedule__name="constant")
    whole, paused = ((runs.folder / name) for name in ("watched", "paused"))
    for name in ("images.json", "checkpoints/step-000004/images.json"):
        assert (whole / name).read_bytes() == (paused / name).read_bytes()


@pytest.mark.proof
def test_a_second_job_on_the_folder_is_refused(study):
    runs: Study = study("sdxl")
    process = runs.start("twice", 2, train__steps=400)
    wait_for(lambda: (runs.folder / "twice" / "status.json").exists(), process)
    code, said = runs.run("twice", 2, train__steps=400)
    process.terminate()
    process.communicate()
    assert code == 6
    assert said.count("another run is writing here") == 1


def test_an_error_of_one_process_is_that_of_all(study, tmp_path):
    runs: Study = study("sdxl")
    code, said = runs.run("missing", 2, model__checkpoint=str(tmp_path / "none.safetensors"))
    assert code == 3 or code == 2
    assert said.count("none.safetensors") == 1


@pytest.mark.proof
def test_memory_that_one_process_lacks_ends_all_with_its_message(study):
    runs: Study = study("sdxl")
    whole = runs.finish("roomy", 2, train__steps=12)
    script = """
import os
from flame_train.errors import OutOfMemory
from flame_train.training import loop
whole, calls = loop.micro, []
def micro(state, batch):
    calls.append(batch)
    if state.group.rank == 1 and len(calls) == 6:
        raise OutOfMemory("no room")
    whole(state, batch)
loop.micro = micro
"""
    code, said = runs.scripted("tight", 2, script, train__steps=12)
    assert code == 5, said
    assert "rank 1: no room" in said
    continued = runs.finish("tight", 2, train__steps=12)
    assert all((whole[name] == continued[name]).all() for name in whole)


def test_callbacks_hear_of_a_step_once(study):
    runs: Study = study("sdxl")
    script = """
import functools
from flame_train.run.commands import stages
from flame_train.training.session import Callbacks
heard = Callbacks(lambda record: print("heard of", record["step"], flush=True))
stages.train = functools.partial(stages.train, callbacks=heard)
"""
    code, said = runs.scripted("heard", 2, script, train__steps=3)
    assert code == 0, said
    assert [said.count(f"heard of {step}") for step in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.proof
def test_a_result_that_cannot_be_written_again_is_told_once(study):
    runs: Study = study("sdxl")
    runs.finish("barred", 2, train__steps=2)
    lora = runs.folder / "barred" / "lora.safetensors"
    lora.unlink()
    lora.mkdir()
    (lora / "mine.txt").write_text("kept")
    code, said = runs.run("barred", 2, train__steps=2)
    assert code == 6, said
    assert "MPI_ABORT" not in said
    assert (lora / "mine.txt").read_text() == "kept"


@pytest.mark.proof
def test_processes_that_see_other_run_folders_are_refused(study):
    runs: Study = study("sdxl")

    def together() -> tuple[int, str]:
        mine = runs.command("here", train__steps=8)
        other = runs.command("here", train__steps=8, output__dir=str(runs.folder / "there"))
        halves = ["-n", "1", *mine, ":", "-n", "1", *other]
        ended = subprocess.run([MPIRUN, *OPEN_MPI, *halves], capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    code, said = together()
    assert code == 6, said
    assert "rank 1 does not see what rank 0 writes" in said
    runs.finish("here", 2, train__steps=8)
    code, said = together()
    assert code == 6, said
    assert "rank 1 would begin anew, rank 0 after step 8" in said
