"""NaN and infinity: the step is not taken, the message names it and its files, and nothing bad is ever saved."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from flame_train.data.cache import DiskCache
from flame_train.io.safetensors import SafetensorsFile


def plant(job, value: float) -> None:
    """Puts `value` into every cached image, through the cache's own hands, so that the checksums are right."""
    cache = DiskCache(job.cache)
    for path in job.cache.rglob("*.safetensors"):
        arrays = cache.get(path.stem)
        if "mean" in arrays:
            cache.put(path.stem, arrays | {"mean": np.full_like(arrays["mean"], value)})


def saved_numbers(job) -> list[np.ndarray]:
    found = []
    for path in job.out.rglob("*.safetensors"):
        with SafetensorsFile(path) as file:
            found += [np.array(file.read(name)) for name in file.names]
    return found


def assert_failed(job, ended, step: int) -> None:
    assert ended.code == 7
    assert f"of step {step} is not finite" in ended.complaint
    assert (job.status()["state"], job.status()["exit_code"]) == ("failed", 7)
    assert job.log() == [] if step == 1 else job.log()[-1]["step"] == step - 1
    assert all(np.isfinite(array).all() for array in saved_numbers(job))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite(job, precision):
    job.fill_cache(train__precision=precision)
    plant(job, np.nan)
    ended = job.train(train__precision=precision)
    assert_failed(job, ended, 1)
    assert "the loss of step 1" in ended.complaint
    files = ended.complaint.split("files in that step:")[1].splitlines()[0]
    assert len([name for name in files.split(",") if name.strip().endswith(".png")]) == 4
    assert job.steps() == []
    assert not (job.out / "lora.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"train__precision": "bf16"}, "try a lower optimizer.lr"),
        ({"gradient__clip_norm": 0.0}, "try a lower optimizer.lr or gradient.clip_norm=1"),
        ({"gradient__clip_norm": 0.5}, "try a lower optimizer.lr"),
        (
            {"train__precision": "fp16", "train__steps": 30, "gradient__clip_norm": 5.0},  # down to the smallest scale
            "try a lower optimizer.lr, gradient.clip_norm=1 or train.precision=bf16",
        ),
    ],
)
def test_what_is_set_already_is_no_advice(another, settings, advice):
    job = another("advice")
    job.fill_cache(**settings)
    plant(job, np.nan)
    assert job.train(**settings).complaint.strip().endswith(f"then {advice}")


def test_a_gradient_that_is_not_finite_leaves_the_last_good_checkpoint(another, whole):
    """The step before was saved; what is on the disk afterwards is what was there before, byte for byte."""
    good = another("good")
    good.train(failpoint="checkpoint.after_rename:2")
    job = another("bad")
    ended = job.train(failpoint="train.gradient:5:nan")
    assert_failed(job, ended, 5)
    assert "the gradient of step 5" in ended.complaint
    assert job.steps() == [2, 4]
    for name in ("lora.safetensors", "optimizer.safetensors"):
        paths = [j.out / "checkpoints" / "step-000004" / name for j in (good, job)]
        assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}) == 1

    assert job.finish() == whole


def test_the_step_after_a_bad_one_is_not_taken_either(job, whole):
    """Figures are read one step late: by then the next step was launched, and must have changed nothing."""
    ended = job.train(failpoint="train.gradient:3:nan")
    assert_failed(job, ended, 3)
    assert job.steps() == [2]
    assert job.finish() == whole


def test_one_overflow_in_fp16_is_skipped_and_halves_the_scale(job):
    job.fill_cache(train__precision="fp16")
    ended = job.train(failpoint="train.gradient:2:nan", train__precision="fp16")
    assert ended.code == 0, ended.stderr
    log = job.log()
    assert [line["loss_scale"] for line in log] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    assert [line["skipped"] for line in log] == [0, 1, 1, 1, 1]
    assert log[2]["lr"] == log[1]["lr"]  # the schedule did not move
    assert all(np.isfinite(array).all() for array in saved_numbers(job))


def test_a_run_with_an_overflow_can_be_continued(another):
    """The scale and the count of skipped steps are part of the state."""
    changes = {"train__precision": "fp16"}
    whole, job = another("whole"), another("killed")
    assert whole.train(failpoint="train.gradient:2:nan", **changes).code == 0
    assert job.train(failpoint="train.gradient:2:nan,train.after_step:3", **changes).code == -9
    assert job.finish(**changes) == whole.result()


def test_overflow_at_every_step_in_fp16_stops_at_the_smallest_scale(job):
    changes = {"train__precision": "fp16", "train__steps": 40, "gradient__accumulation": 1, "checkpoint__every": 0}
    ended = job.train(failpoint="train.gradient:all:nan", **changes)
    assert_failed(job, ended, 17)
    assert "at the smallest loss scale" in ended.complaint
    assert [line["loss_scale"] for line in job.log()] == [2.0**k for k in range(16, 0, -1)]


def test_a_model_that_overflows_in_fp16_by_itself(job):
    """No fault is planted in the program here: images a million times too bright do it."""
    job.fill_cache(train__precision="fp16")
    plant(job, 1e8)
    changes = {"train__precision": "fp16", "train__steps": 40, "gradient__accumulation": 1}
    ended = job.train(**changes)
    assert ended.code == 7
    assert "is not finite at the smallest loss scale" in ended.complaint
    assert all(np.isfinite(array).all() for array in saved_numbers(job))
