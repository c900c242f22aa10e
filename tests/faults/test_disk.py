"""A disk that is full or too small: the run ends with what is needed and what there is, and goes on afterwards."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from flame_train.config.load import load_located
from flame_train.errors import OutputError
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import make_plan
from flame_train.run.plan.start import checkpoint_here, run_folder
from flame_train.training.session import StopRequest
from tests.faults.conftest import make_job

SAMPLING = {"sample__every": 2, "sample__steps": 2, "sample__prompts": ["a drawing"]}


@pytest.mark.parametrize(
    "point",
    ["checkpoint.begin:2", "checkpoint.after_file:5", "checkpoint.before_manifest:2", "checkpoint.before_rename:2"],
)
def test_a_disk_that_fills_while_a_checkpoint_is_saved(job, whole, point):
    ended = job.train(failpoint=f"{point}:enospc")
    assert ended.code == 6
    assert re.search(r"step-000004: the disk is full: needs \d+\.\d KiB, has \d+\.\d \w+; free some", ended.complaint)
    assert job.steps() == [2]
    assert not list((job.out / "checkpoints").glob(".*"))
    assert (job.status()["state"], job.status()["exit_code"]) == ("failed", 6)

    assert job.finish() == whole


def test_a_limit_on_the_size_of_files(job, whole):
    limit = 13_000  # more than the LoRA takes, less than its moments
    ended = job.train(limits={"RLIMIT_FSIZE": limit})
    assert ended.code == 6
    assert re.search(r"optimizer.safetensors: a file of \d+\.\d KiB is larger .*\(ulimit -f\)", ended.complaint)
    assert job.steps() == []
    assert job.debris() == []

    assert job.finish() == whole


def test_a_disk_that_fills_while_the_result_is_written(job, whole):
    """The last checkpoint is there, and the result is made from it."""
    ended = job.train(failpoint="train.before_result:enospc")
    assert ended.code == 6
    assert "the disk is full" in ended.complaint
    assert job.steps() == [2, 4, 5]
    assert not (job.out / "lora.safetensors").exists()

    assert job.finish() == whole


def test_a_disk_that_fills_while_caching(new_job, whole):
    ended = new_job.train(failpoint="file.before_rename:9:enospc")
    assert ended.code == 6
    assert "the disk is full: needs" in ended.complaint
    assert str(new_job.cache) in ended.complaint
    assert new_job.debris() == []

    assert new_job.finish() == whole


@pytest.mark.parametrize("nth", ["all", "2", *(pytest.param(n, marks=pytest.mark.proof) for n in ("1", "5"))])
def test_a_log_without_room_costs_one_warning_and_is_whole_at_the_next_start(job, whole, nth):
    ended = job.train(failpoint=f"log.append:{nth}:enospc")
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("log.jsonl") == 1
    assert "its lines wait for room" in ended.stderr
    result = job.result()
    assert result.log == ([] if nth == "all" else whole.log)
    assert result.lora == whole.lora
    assert {
        name: result.checkpoint[name]
        for name in ("images.json", "lora.safetensors", "optimizer.safetensors", "state.json")
    } == {name: digest for name, digest in whole.checkpoint.items() if name != "MANIFEST.json"}
    assert job.finish().log == whole.log


def grids(job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (job.out / "samples").glob("*.png")}


def test_a_sample_grid_that_cannot_be_drawn_costs_the_image(job, whole):
    ended = job.train(failpoint="sample.step:all:enospc", **SAMPLING)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("no sample grid at step") == 3
    assert grids(job) == {}
    assert job.result() == whole


@pytest.fixture(scope="module")
def plain_grids(program, tmp_path_factory, world, undisturbed):
    """The grids of a run that always had room."""
    plain = make_job(program, tmp_path_factory.mktemp("plain"), world)
    shutil.copytree(undisturbed.cache, plain.cache)
    plain.finish(**SAMPLING)
    return grids(plain)


@pytest.mark.parametrize("then", ["goes on to its end", "is killed"])
@pytest.mark.parametrize("nth", ["1", *(pytest.param(n, marks=pytest.mark.proof) for n in ("2", "3")), "all"])
def test_a_sample_grid_without_room_is_there_after_the_next_start(job, plain_grids, whole, nth, then):
    """It is of weights that are others by then: it waits for room, in memory and in the checkpoint."""
    kill = ",train.in_step:9" if then == "is killed" else ""  # step 5, after two checkpoints
    ended = job.train(failpoint=f"sample.before_write:{nth}:enospc{kill}", **SAMPLING)
    assert ended.code == (-9 if kill else 0), ended.stderr
    assert "waits for room" in ended.stderr
    assert job.finish(**SAMPLING).lora == whole.lora
    assert grids(job) == plain_grids
    assert len(grids(job)) == 3


@pytest.fixture
def pipeline_on_a_small_disk(monkeypatch):
    """small(free): a disk with so many bytes free."""
    return lambda free: monkeypatch.setattr("flame_train.disk.preflight.free_bytes", lambda path: free)


def test_a_run_that_goes_on_needs_room_only_for_what_it_will_add(job, pipeline_on_a_small_disk):
    """Of three checkpoints to keep two are there; with the last step done nothing is added."""
    plan = make_plan(check(load_located(job.arguments("sdxl-lora")[2], [])), StopRequest())
    one = plan.parameters * 16
    pipeline_on_a_small_disk(int(one * 4 * 1.2) + 1)
    checkpoint_here(plan, run_folder(plan))
    pipeline_on_a_small_disk(int(one * 3 * 1.2))
    with pytest.raises(OutputError, match="too full to start"):
        checkpoint_here(plan, run_folder(plan))
    assert job.train(failpoint="train.before_update:5").code == -9
    assert job.steps() == [2, 4]
    pipeline_on_a_small_disk(int(one * 2 * 1.2) + 1)
    assert checkpoint_here(plan, run_folder(plan)).step == 4
    job.finish()
    pipeline_on_a_small_disk(0)
    assert checkpoint_here(plan, run_folder(plan)).step == 5


def test_a_disk_too_small_for_the_run_is_told_before_anything_is_encoded(new_job):
    """The plan asks for more than any disk has."""
    ended = new_job.train(checkpoint__keep=10**12)
    assert ended.code == 6
    assert "too full to start: needs" in ended.complaint
    assert not new_job.cache.exists()
    assert not new_job.out.exists()


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_encoded(new_job):
    (new_job.folder / "out").write_text("a file of the user's")
    ended = new_job.train()
    assert ended.code == 6
    assert "expected a folder" in ended.complaint
    assert not new_job.cache.exists()
    assert (new_job.folder / "out").read_text() == "a file of the user's"


def test_a_cache_that_cannot_be_written_names_the_setting(new_job):
    """As the plan says it, of training and of `cache`."""
    new_job.cache.write_text("a file of the user's")
    for ended in (new_job.plan(), new_job.plan("cache"), new_job.fill_cache(), new_job.train()):
        assert ended.code == 6
        assert "data.cache says where encoded images are kept" in ended.complaint
        assert "output.dir" not in ended.complaint


def test_every_line_of_the_log_is_json_for_any_reader(job):
    """NaN and Infinity are no JSON: a step that overflows in fp16 has null for its norm."""
    job.train(failpoint="train.gradient:2:nan", train__precision="fp16")
    lines = (job.out / "log.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert records[1]["grad_norm"] is None
