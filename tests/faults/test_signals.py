"""Asked to stop, the program finishes the step, saves, says so and exits with 128 plus the signal's number.

Unless the step was the last: then it is done.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SIGNALS = {"int": 130, "term": 143, "hup": 129, "usr1": 138}


def assert_stopped(job, ended, code: int) -> None:
    assert ended.code == code, ended.stderr
    name = signal.Signals(code - 128).name
    assert "stopped " in ended.early_stop_message
    assert "error: " not in ended.stderr
    heard = ended.stderr.index(f"{name}: stopping as soon as no work is lost; a second signal stops at once")
    assert heard < ended.stderr.index("\nstopped ")
    assert (job.status()["state"], job.status()["exit_code"]) == ("interrupted", code)


def some(*usual: str) -> list[object]:
    """All signals; those not named where proofs are asked for. What hears them is the same."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.proof) for name in SIGNALS]


@pytest.mark.parametrize("action", some("int", "hup"))
def test_a_signal_in_a_step_finishes_and_saves_that_step(job, whole, action):
    ended = job.train(failpoint=f"train.in_step:5:{action}")  # the first half of step 3
    assert_stopped(job, ended, SIGNALS[action])
    assert job.steps() == [2, 3]
    assert [line["step"] for line in job.log()] == [1, 2, 3]
    assert "stopped after step 3, saved; run the same command to continue" in ended.early_stop_message

    assert job.finish() == whole


@pytest.mark.parametrize(
    "point",
    [
        "train.before_update:3",
        "train.after_step:3",
        "checkpoint.begin",
        "checkpoint.mid_file",
        "checkpoint.before_rename",
        "checkpoint.after_rename",
        "checkpoint.before_prune",
    ],
)
def test_a_signal_anywhere_in_the_loop_leaves_a_whole_run_behind(job, whole, point):
    """Between the step and its save, and while saving: the log has every saved step, and the result is the same."""
    ended = job.train(failpoint=f"{point}:int")
    assert_stopped(job, ended, 130)
    saved = job.steps()[-1]
    assert [line["step"] for line in job.log()] == list(range(1, saved + 1))

    assert job.finish() == whole


@pytest.mark.parametrize("point", ["train.in_step:10", "train.before_result"])
def test_a_signal_in_the_last_step_has_nothing_to_stop(job, whole, point):
    ended = job.train(failpoint=f"{point}:term")
    assert ended.code == 0, ended.stderr
    assert job.result() == whole


def test_a_signal_while_caching_keeps_what_was_encoded(new_job, whole):
    ended = new_job.train(failpoint="encode.before_put:4:int")
    assert_stopped(new_job, ended, 130)
    assert len(list(new_job.cache.rglob("*.safetensors"))) == 4
    assert new_job.steps() == []

    assert new_job.finish() == whole


def test_the_cache_command_can_be_stopped_too(new_job):
    ended = new_job.fill_cache(failpoint="encode.before_put:4:term")
    assert ended.code == 143
    assert "\nstopped " in ended.stderr
    assert len(list(new_job.cache.rglob("*.safetensors"))) == 4


SAMPLING = {"sample__every": 3, "sample__steps": 3, "sample__prompts": ["a drawing"], "checkpoint__every": 4}


def test_a_signal_while_sampling_saves_the_step_before_it(job, whole):
    """The grid is due at a step that has no checkpoint of its own: one is made before the program ends."""
    ended = job.train(failpoint="sample.step:5:int", **SAMPLING)  # 3 calls make the grid of step 0
    assert_stopped(job, ended, 130)
    assert job.steps() == [3]
    assert sorted(path.name for path in (job.out / "samples").iterdir()) == ["step-000000.png"]

    assert job.finish(**SAMPLING).lora == whole.lora
    assert sorted(path.name for path in (job.out / "samples").iterdir()) == ["step-000000.png", "step-000003.png"]


def test_a_signal_in_the_first_grid_stops_before_the_first_step(job):
    ended = job.train(failpoint="sample.step:2:int", **SAMPLING)
    assert_stopped(job, ended, 130)
    assert "before the next step" in ended.early_stop_message
    assert (job.steps(), job.log()) == ([], [])


def test_a_second_signal_ends_the_program_at_once(job, whole):
    """It does not wait for the step; what was saved before stays, and the next run is the same as ever."""
    ended = job.train(failpoint="train.in_step:6:int,train.before_update:3:int")
    assert ended.code == 130
    assert "stopped at once" in ended.stderr
    assert job.steps() == [2]
    assert job.status()["state"] == "running"

    assert job.finish() == whole


def test_a_terminal_that_is_closed_stops_the_run_as_a_signal_does(job, program, whole):
    """The progress bar has nowhere to go any more; the step is finished and saved all the same."""
    master, terminal = os.openpty()
    script = (
        "import fcntl, os, sys, termios\n"
        "os.setsid()\n"
        f"fcntl.ioctl({terminal}, termios.TIOCSCTTY, 0)\n"
        f"os.dup2({terminal}, 2)\n"
        f"os.close({terminal})\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = program.start_python("-c", script, *job.arguments("sdxl-lora", train__steps=200), pass_fds=[terminal])
    os.close(terminal)
    while b"loss" not in os.read(master, 4096):
        pass
    os.close(master)
    process.communicate()
    assert process.returncode == 129
    assert (job.status()["state"], job.status()["exit_code"]) == ("interrupted", 129)
    assert job.steps()[-1] == job.log()[-1]["step"] == job.status()["step"]


def test_a_hangup_that_nohup_ignores_does_not_stop_the_run(job, program, whole):
    ignoring = [
        "-c",
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    ]
    armed = [str(Path(__file__).with_name("armed.py")), "train.in_step:5:hup"]
    process = program.start_python(*ignoring, *armed, *job.arguments("sdxl-lora"))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert job.result() == whole


def test_these_tests_do_not_depend_on_what_whoever_started_them_ignores(job, program):
    """Under `nohup` a child would ignore SIGHUP from the beginning, and rightly go on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        warm = program(*job.arguments("sdxl-lora"), failpoint="train.in_step:1:hup")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert warm.code == 129


@pytest.mark.parametrize("action", some("term", "usr1"))
def test_a_merge_that_is_stopped_leaves_nothing_behind(undisturbed, program, world, action, tmp_path):
    out = tmp_path / "merged" / "model.safetensors"
    arguments = ["merge", str(world / "base.safetensors"), str(undisturbed.out / "lora.safetensors"), str(out)]
    ended = program(*arguments, failpoint=f"file.mid_write:3:{action}")
    assert ended.code == SIGNALS[action]
    assert "stopped while merging; nothing was written" in ended.early_stop_message
    assert list(out.parent.iterdir()) == []
    assert program(*arguments).code == 0
