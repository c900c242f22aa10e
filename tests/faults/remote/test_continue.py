"""Runs with a copy in a store: killed, their folder removed, started again elsewhere, to the same bytes."""

from __future__ import annotations

import json
import shutil
import signal
import time
from typing import Any

import pytest

SLOW_TO_BRING = ("remote.begun", "remote.brought:1", "checkpoint.after_manifest")
SLOW = ("train.in_step:7", "checkpoint.before_rename:2", "remote.after_file:2", "remote.after_manifest")
PLACES = (
    "remote.before_manifest",
    "remote.after_manifest:2",
    "remote.before_prune",
    "train.before_result",
    *(pytest.param(place, marks=pytest.mark.proof) for place in SLOW),
)


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_its_folder_removed_a_run_ends_with_the_same_bytes(
    remote: Any, bucket: Any, undisturbed: Any, place: str
) -> None:
    keep = {"checkpoint__keep": 1} if "prune" in place else {}
    assert remote.train(failpoint=place, **keep).code == -signal.SIGKILL
    assert set(remote.whole(bucket)) <= {2, 4, 5}
    shutil.rmtree(remote.job.out)
    ended = remote.train(**keep)
    assert ended.code == 0, ended.stderr
    assert remote.job.result() == undisturbed.result
    kept = remote.whole(bucket)
    assert set(remote.job.steps()) <= set(kept) <= {2, 4, 5}
    assert len(kept) <= keep.get("checkpoint__keep", 3)
    there = {path.removeprefix(f"{remote.place}/") for path in bucket.find(remote.place)}
    out = remote.job.out
    here = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert here <= there
    assert {name for name in there - here if "step-000002" not in name} == {"lease.json"}
    assert all(bucket.cat(f"{remote.place}/{name}") == (out / name).read_bytes() for name in here)


@pytest.mark.parametrize(
    "place", ["remote.brought:4", *(pytest.param(place, marks=pytest.mark.proof) for place in SLOW_TO_BRING)]
)
def test_killed_while_it_is_brought_a_run_is_brought_again(remote: Any, undisturbed: Any, place: str) -> None:
    assert remote.train(failpoint="remote.after_manifest:2").code == -signal.SIGKILL
    shutil.rmtree(remote.job.out)
    assert remote.train(failpoint=place).code == -signal.SIGKILL
    ended = remote.train()
    assert ended.code == 0, ended.stderr
    assert "bringing step" in ended.stderr
    assert remote.job.result() == undisturbed.result


def test_samples_come_back_and_old_checkpoints_go(remote: Any, bucket: Any) -> None:
    drawing = {"sample__every": 2, "sample__prompts": ["a drawing"], "sample__steps": 1, "checkpoint__keep": 1}
    assert remote.train(failpoint="train.after_step:5", **drawing).code == -signal.SIGKILL
    ended = remote.train(**drawing)
    assert ended.code == 0, ended.stderr
    assert remote.whole(bucket) == [5]
    grids = {path.name: path.read_bytes() for path in (remote.job.out / "samples").iterdir()}
    assert sorted(grids) == ["step-000000.png", "step-000002.png", "step-000004.png"]
    shutil.rmtree(remote.job.out)
    ended = remote.train(**drawing)
    assert ended.code == 0, ended.stderr
    assert {path.name: path.read_bytes() for path in (remote.job.out / "samples").iterdir()} == grids
    assert remote.job.steps() == [5]


def test_a_run_that_is_further_here_wins(remote: Any, bucket: Any, undisturbed: Any) -> None:
    assert remote.train(failpoint="remote.after_manifest").code == -signal.SIGKILL
    assert remote.job.finish() == undisturbed.result  # without the store
    ended = remote.train()
    assert ended.code == 0, ended.stderr
    assert "is at step 5, the copy at" in ended.stderr
    assert remote.job.result() == undisturbed.result
    assert remote.whole(bucket) == [2, 4, 5]


def test_two_runs_that_went_different_ways_are_refused(remote: Any, bucket: Any) -> None:
    assert remote.train().code == 0
    log = remote.job.out / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[3] = json.dumps(json.loads(lines[3]) | {"loss": 7.0}) + "\n"
    log.write_text("".join(lines))
    before = {path: bucket.cat(path) for path in bucket.find(remote.place) if "lease" not in path}
    ended = remote.train()
    assert ended.code == 8
    assert f"s3://{remote.place}, at step 5, and {remote.job.out}, at step 5, went different ways from step 4 on" in (
        ended.complaint
    )
    assert {path: bucket.cat(path) for path in bucket.find(remote.place) if "lease" not in path} == before


def test_a_run_with_other_settings_is_refused_before_anything_is_written(remote: Any) -> None:
    assert remote.train().code == 0
    shutil.rmtree(remote.job.out)
    ended = remote.train(train__seed=7)
    assert ended.code == 8
    assert "train.seed" in ended.complaint
    assert not remote.job.out.exists()


def test_files_of_something_else_are_not_written_over(remote: Any, bucket: Any) -> None:
    bucket.pipe(f"{remote.place}/log.jsonl", b"somebody's")
    ended = remote.train()
    assert ended.code == 8
    assert "expected nothing or the copy of a run, but found log.jsonl" in ended.complaint
    assert bucket.cat(f"{remote.place}/log.jsonl") == b"somebody's"


def test_a_damaged_copy_is_passed_over_for_the_one_before(remote: Any, bucket: Any, undisturbed: Any) -> None:
    assert remote.train(failpoint="remote.after_manifest:2").code == -signal.SIGKILL
    newest = remote.whole(bucket)[-1]
    bucket.rm(f"{remote.place}/checkpoints/step-{newest:06d}/optimizer.safetensors")
    shutil.rmtree(remote.job.out)
    ended = remote.train()
    assert ended.code == 0, ended.stderr
    assert f"the checkpoint of step {newest} lacks a file" in ended.stderr
    assert remote.job.result() == undisturbed.result


def test_sigterm_saves_and_uploads(remote: Any, bucket: Any, undisturbed: Any) -> None:
    begun = time.monotonic()
    ended = remote.train(failpoint="train.after_step:3:term")
    assert ended.code == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 30
    assert 3 in remote.whole(bucket)
    assert json.loads(bucket.cat(f"{remote.place}/status.json"))["state"] == "interrupted"
    shutil.rmtree(remote.job.out)
    assert remote.train().code == 0
    assert remote.job.result() == undisturbed.result


def test_a_run_without_a_store_imports_nothing_for_it(job: Any) -> None:
    code = (
        "import sys\n"
        "from flame_train.run.commands.stages import train\n"
        f"train({json.dumps(job.arguments('x')[2])}, [], 'cpu', False)\n"
        "sys.exit(any(name.split('.')[0] in ('fsspec', 's3fs', 'sshfs', 'botocore') or "
        "name.startswith('flame_train.remote') for name in sys.modules))"
    )
    process = job.program.start_python("-c", code)
    _, error = process.communicate()
    assert process.returncode == 0, error
