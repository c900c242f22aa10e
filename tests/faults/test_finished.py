"""A run whose steps are all made, started again: what it tells, makes anew and leaves alone."""

from __future__ import annotations

import json

import pytest

from flame_train.io.safetensors import SafetensorsFile


def test_a_refusal_leaves_a_finished_run_finished(own):
    own.finish()
    status = own.status()
    (own.folder / "drawings" / "0.txt").write_text("something else")
    assert own.train().code == 6
    assert own.status() == status


def test_a_finished_run_is_left_as_it_is(finished, whole):
    ended = finished.train()
    assert ended.code == 0
    assert "done already" in ended.stderr
    assert finished.result() == whole


def test_the_result_names_what_is_there_and_a_finished_run_still_knows_its_loss(job):
    said = [json.loads(job.program(*job.arguments("sdxl-lora"), "--json").stdout) for _ in range(2)]
    assert said[0] == said[1]
    assert said[0]["last_step_loss"] == job.log()[-1]["loss"]
    assert said[0]["samples"] is None


def test_a_result_of_fewer_steps_is_not_taken_for_the_longer_run_s(another):
    """A run that is made longer, and is killed just before its result: the old result lies in its place."""
    longer = {"schedule__name": "constant", "schedule__warmup_steps": 0}
    whole = another("whole").finish(**longer)
    job = another("longer")
    job.finish(train__steps=3, **longer)
    assert job.train(failpoint="train.before_result", **longer).code == -9
    assert job.finish(**longer).lora == whole.lora


def test_a_run_is_not_asked_for_fewer_steps_than_it_has(job):
    """Its LoRA would be called one of three steps and hold five."""
    constant = {"schedule__name": "constant", "schedule__warmup_steps": 0}
    whole = job.finish(**constant)
    for ended in (job.plan(train__steps=3, **constant), job.train(train__steps=3, **constant)):
        assert ended.code == 6
        assert "its run is at step 5, beyond train.steps = 3" in ended.complaint
    assert job.result() == whole
    assert "steps = 5" in (job.out / "config.toml").read_text()


def test_the_result_is_in_the_format_last_asked_for(finished):
    assert finished.finish(output__format="diffusers").lora
    with SafetensorsFile(finished.out / "lora.safetensors") as file:
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in file.names)


def test_a_run_is_continued_under_another_name_to_the_same_weights(another):
    """The checkpoints of the first name are continued; each file says its own name, and holds the same tensors."""
    constant = {"schedule__name": "constant", "schedule__warmup_steps": 0}
    whole = another("unnamed")
    whole.finish(**constant)
    made = another("named")
    assert made.train(train__steps=3, output__name="first", **constant).code == 0
    ended = made.train(output__name="tiles", output__format="both", **constant)
    assert ended.code == 0, ended.stderr
    assert {path.name for path in made.out.glob("*.safetensors")} == {
        "first.safetensors",
        "tiles.safetensors",
        "tiles.diffusers.safetensors",
    }
    assert (made.out / "checkpoints" / "step-000005" / "tiles-000005.safetensors").exists()
    with (
        SafetensorsFile(made.out / "tiles.safetensors") as file,
        SafetensorsFile(whole.out / "lora.safetensors") as own,
    ):
        assert file.metadata["ss_output_name"] == "tiles"
        assert all(file.read(name).tobytes() == own.read(name).tobytes() for name in own.names)


@pytest.mark.parametrize("name", ["a/b", ".hidden", "tiles.safetensors", "a:b", "ends.", "x" * 201])
def test_a_name_that_no_file_can_have_everywhere_is_refused(job, name):
    ended = job.plan(output__name=name)
    assert ended.code == 2
    assert "output.name: expected a file name without folder and ending" in ended.stderr


def test_a_format_that_is_no_longer_asked_for_leaves_no_file_of_an_earlier_result(another):
    made = another("both", schedule__name="constant")
    made.finish(output__format="both", train__steps=4)
    second = made.out / "lora.diffusers.safetensors"
    assert second.exists()
    ended = made.train(output__format="kohya")
    assert ended.code == 0, ended.stderr
    assert not second.exists()
    assert f"removed {second}" in ended.stderr
    made.finish(output__format="both")
    with SafetensorsFile(second) as file:
        assert file.metadata["ss_steps"] == "5"
