"""Killed at any moment, a run that is started again ends in the same bytes as one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flame_train.data.cache import DiskCache

SEEDS = int(os.environ.get("FLAME_TEST_KILLS", "25"))
EACH_TIME = 4
KILLED = -signal.SIGKILL

POINTS = [
    "train.in_step",
    pytest.param("train.in_step:6", marks=pytest.mark.proof),  # on the disk it is as the next
    "train.before_update:3",
    "train.after_step:3",
    "train.after_step:4",
    "checkpoint.begin:2",
    "checkpoint.mid_file:2",
    "checkpoint.after_file:4",
    pytest.param("checkpoint.after_file:5", marks=pytest.mark.proof),
    "checkpoint.before_manifest:2",
    "checkpoint.after_manifest:2",
    "checkpoint.before_rename:2",
    "checkpoint.after_rename:2",
    "checkpoint.before_prune:3",
    "checkpoint.mid_prune",
    "train.before_result",
    "file.mid_write:2",
    "file.before_rename:7",
]


@pytest.mark.parametrize(
    "seed", [*range(EACH_TIME), *(pytest.param(n, marks=pytest.mark.proof) for n in range(EACH_TIME, SEEDS))]
)
def test_killed_at_random_times_and_continued(new_job, whole, seconds, seed):
    job, rng = new_job, random.Random(seed)
    ended = job.train(kill_after=rng.uniform(0.0, 1.1 * seconds))
    while ended.code == KILLED and rng.random() < 0.3:
        ended = job.train(kill_after=rng.uniform(0.0, seconds))
    assert ended.code in (0, KILLED), ended.stderr

    assert job.finish() == whole
    assert job.debris() == []


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_chosen_place_and_continued(job, whole, point):
    keep = 1 if "prune" in point else 3  # so that there is something to prune
    assert job.train(failpoint=point, checkpoint__keep=keep).code == KILLED

    assert job.finish(checkpoint__keep=keep) == whole
    assert job.debris() == []


def test_killed_three_times_at_different_depths(job, whole):
    """A resume of a resume of a resume: steps, epochs and rates go on as if nothing had been."""
    for point in ("train.after_step:3", "checkpoint.before_rename", "train.before_update:2"):
        assert job.train(failpoint=point).code == KILLED
    assert job.finish() == whole


@pytest.mark.parametrize("point", ["encode.before_put:9", "file.mid_write:9", "file.before_rename:9"])
def test_killed_while_caching_leaves_no_entry_that_is_not_whole(new_job, whole, point):
    assert new_job.fill_cache(failpoint=point).code == KILLED
    entries = [path for path in new_job.cache.rglob("*.safetensors") if not path.name.startswith(".")]
    assert 0 < len(entries) < 13
    cache = DiskCache(new_job.cache)
    assert all(cache.get(path.stem) is not None for path in entries)

    assert new_job.finish() == whole


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file() and path.name != ".lock"]


@pytest.mark.parametrize("point", ["file.mid_write:9", "file.before_rename:9"])
def test_what_a_killed_encoding_left_is_swept_although_nothing_is_written_there_any_more(new_job, point):
    assert new_job.fill_cache(failpoint=point).code == KILLED
    (left,) = leftovers(new_job.cache)
    assert new_job.fill_cache().code == 0
    assert leftovers(new_job.cache) == []
    left.touch()  # a part of the cache that no later write comes by
    assert '"encoded": 0' in new_job.fill_cache().stdout
    assert leftovers(new_job.cache) == []


@pytest.mark.parametrize("command", ["convert", "merge", "sample"])
@pytest.mark.parametrize("point", ["file.mid_write", "file.before_rename"])
def test_what_a_killed_command_left_is_swept_by_the_next(undisturbed, program, world, command, point, tmp_path):
    base, lora, out = str(world / "base.safetensors"), str(undisturbed.out / "lora.safetensors"), tmp_path / "results"

    def arguments(name: str) -> list[str]:
        return {
            "convert": ["convert", lora, f"{out / name}.safetensors", "--to", "diffusers"],
            "merge": ["merge", base, lora, f"{out / name}.safetensors"],
            "sample": [
                "sample",
                "-m",
                base,
                "-p",
                "a drawing",
                "-o",
                f"{out / name}.png",
                "--steps",
                "1",
                "--width",
                "64",
                "--height",
                "64",
                "--precision",
                "fp32",
                "--device",
                "cpu",
            ],
        }[command]

    assert program(*arguments("first"), failpoint=point).code == KILLED
    assert len(leftovers(out)) == 1
    assert program(*arguments("second")).code == 0
    assert [path.stem for path in out.iterdir()] == ["second"]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty"])
def test_damaged_cache_entries_are_made_again(job, whole, damage):
    for path in sorted(job.cache.rglob("*.safetensors"))[::3]:
        raw = bytearray(path.read_bytes())
        if damage == "bit":
            raw[-5] ^= 4
        path.write_bytes({"cut": raw[: len(raw) // 2], "bit": raw, "empty": b""}[damage])

    assert job.finish() == whole


@pytest.mark.parametrize("change", ["another name", "another shape", "one less", "one more"])
def test_cache_entries_with_other_arrays_are_made_again(job, whole, change):
    """Their keys and checksums are right: another program may have written them."""
    cache = DiskCache(job.cache)
    for path in sorted(job.cache.rglob("*.safetensors"))[::3]:
        arrays = cache.get(path.stem)
        assert arrays is not None
        name, array = arrays.popitem()
        changed = {
            "another name": {**arrays, "x": array},
            "another shape": {**arrays, name: np.concatenate([array, array])},
            "one less": arrays,
            "one more": {**arrays, name: array, "x": array},
        }
        cache.put(path.stem, changed[change])

    assert job.finish() == whole


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.proof), pytest.param(2, marks=pytest.mark.proof)]
)
def test_a_cold_program_killed_from_outside(job, program, whole, seconds, seed):
    """As a user would meet it: a new interpreter, killed by another process, started again by hand."""
    process = program.start_python("-m", "flame_train", *job.arguments("sdxl-lora"))
    try:
        process.communicate(timeout=1.0 + random.Random(100 + seed).uniform(0.2, 1.0) * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    ended = program.cold(*job.arguments("sdxl-lora"))
    assert ended.code == 0, ended.stderr
    assert job.result() == whole


def test_the_next_run_starts_although_a_killed_one_left_its_lock_file(job, begin_killed):
    begin_killed(job)
    assert (job.out / ".lock").exists()
    assert job.status()["state"] == "running"
    job.finish()


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.proof), "fp16"])
def test_continued_in_low_precision(another, precision):
    """fp16 begins with a loss scale that overflows, so the scaler's state matters, too."""
    changes = {"train__precision": precision, "optimizer__name": "sgd", "optimizer__momentum": 0.9}
    whole = another("whole").finish(**changes)
    job = another("killed")
    for point in ("train.after_step:3", "train.before_update:2"):
        assert job.train(failpoint=point, **changes).code == KILLED
    assert job.finish(**changes) == whole


OTHERS = (pytest.param(one, marks=pytest.mark.proof) for one in ("train.in_step:1:boom", "train.gradient:nan"))


@pytest.mark.parametrize("value", ["train.in_step", "\u00b2:all", *OTHERS])
def test_the_environment_of_an_installed_program_does_nothing_to_a_run(job, whole, value):
    ended = job.program(*job.arguments("sdxl-lora"), env={"FLAME_TEST_FAILPOINT": value})
    assert ended.code == 0, ended.stderr
    assert job.result() == whole
