"""A run whose steps are all made, started again: what it tells, makes anew and leaves alone."""

from __future__ import annotations

import json

from flame_train.io.safetensors import SafetensorsFile


def test_a_refusal_leaves_a_finished_run_finished(own):
    own.finish()
    status = own.status()
    (own.folder / "drawings" / "0.txt").write_text("something else")
    assert own.train().code == 6
    assert own.status() == status


def test_a_finished_run_is_left_as_it_is(job, whole):
    job.finish()
    ended = job.train()
    assert ended.code == 0
    assert "done already" in ended.stderr
    assert job.result() == whole


def test_the_result_names_what_is_there_and_a_finished_run_still_knows_its_loss(job):
    said = [json.loads(job.program(*job.arguments("sdxl-lora"), "--json").stdout) for _ in range(2)]
    assert said[0] == said[1]
    assert said[0]["loss"] == job.log()[-1]["loss"]
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


def test_the_result_is_in_the_format_last_asked_for(job):
    job.finish()
    assert job.finish(output__format="diffusers").lora
    with SafetensorsFile(job.out / "lora.safetensors") as file:
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in file.names)


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
