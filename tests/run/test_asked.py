"""What `flame-train ask` asks of a run that goes on: taken at a step's end, and no bit of the result by it."""

from __future__ import annotations

import json
import logging
import os
from types import MappingProxyType

import pytest

import flame_train
from flame_train import cli
from flame_train.errors import Interrupted
from flame_train.io.requests import KINDS, name_of
from tests.run_files import log_of

from .test_from_python import sections


def nothing(folder):
    pass


@pytest.fixture
def trained(small_config, tmp_path):
    """trained(name, acts): the folder of a run of five steps; `acts[n](folder)` happens while step n + 1 is made."""
    config = small_config(
        train={"precision": "fp32", "steps": 5},
        sample={"every": 100, "first": False, "steps": 1, "prompts": ("a circle",)},
        checkpoint={"every": 4, "keep": 9},
    )

    def train(name, acts=MappingProxyType({})):
        folder = tmp_path / name / "run"  # whose name stands in the LoRA
        flame_train.train(
            sections(config, folder),
            device="cpu",
            on_step=lambda record: acts.get(record["step"], nothing)(folder),
            quiet=True,
        )
        return folder

    return train


def ask(*kinds):
    def act(folder):
        for kind in kinds:
            assert cli.run(["ask", str(folder), kind]) == 0
            assert (folder / name_of(kind)).is_file()

    return act


def what_was_trained(folder):
    """The bytes of the LoRA and of the last checkpoint, and the log without what depends on the clock."""
    log = log_of(folder)
    of_clock = ("images_per_s", "data_wait_ms", "memory")
    last = sorted((folder / "checkpoints" / "step-000005").iterdir())
    return (
        (folder / "lora.safetensors").read_bytes(),
        {file.name: file.read_bytes() for file in last},
        [{key: value for key, value in line.items() if key not in of_clock} for line in log],
    )


def test_samples_and_a_checkpoint_now_change_no_byte_of_the_result(trained):
    asked, alone = trained("asked", {1: ask("sample", "save")}), trained("alone")
    assert [file.name for file in (asked / "samples").iterdir()] == ["step-000002.png"]
    assert {path.name for path in (asked / "checkpoints").iterdir()} == {f"step-00000{n}" for n in (2, 4, 5)}
    assert not (alone / "samples").exists()
    assert not any((asked / name_of(kind)).exists() for kind in KINDS)
    assert what_was_trained(asked) == what_was_trained(alone)


def test_a_stop_saves_and_the_next_start_takes_no_old_request(trained, tmp_path):
    with pytest.raises(Interrupted, match="after step 3, saved; run the same command") as stopped:
        trained("run", {2: ask("stop")})
    assert stopped.value.signal_number == 2
    status = json.loads((tmp_path / "run" / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["saved"]) == ("interrupted", 130, 3)
    (tmp_path / "run" / "run" / name_of("stop")).write_text('{"ask": "stop"}')
    assert what_was_trained(trained("run")) == what_was_trained(trained("alone"))


def test_damaged_requests_are_named_once_each_and_end_no_run(trained, caplog, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text('{"ask": "stop"}')

    def act(folder):
        (folder / name_of("sample")).symlink_to(outside)
        (folder / name_of("save")).mkdir()
        os.mkfifo(folder / name_of("stop"))

    def later(folder):
        for kind in KINDS:
            place = folder / name_of(kind)
            place.rmdir() if place.is_dir() else place.unlink()
        (folder / name_of("sample")).write_text('{"ask": "sa')
        (folder / name_of("stop")).write_text('{"ask": "save"}')

    with caplog.at_level(logging.WARNING):
        folder = trained("run", {1: act, 3: later})
    told = [message for message in caplog.messages if "refused" in message]
    assert sorted(line.split(":")[0].rpartition("/")[2] for line in told) == sorted(
        map(name_of, [*KINDS, "sample", "stop"])
    )
    assert (folder / "lora.safetensors").exists()
    assert not (folder / "samples").exists()
    assert outside.read_text() == '{"ask": "stop"}'


def test_nobody_is_asked_where_no_run_goes_on(trained, capsys, tmp_path):
    folder = trained("run")
    assert cli.run(["ask", str(folder), "save"]) == 6
    assert "expected a run that goes on, got one that is done; start it first" in capsys.readouterr().err
    assert cli.run(["ask", str(tmp_path / "nothing"), "save"]) == 6
    assert cli.run(["ask", str(folder), "more"]) == 2


def test_samples_are_not_asked_of_a_run_without_prompts(trained, capsys):
    def act(folder):
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("every = 100", "every = 0"))
        assert cli.run(["ask", str(folder), "sample"]) == 2

    trained("run", {1: act})
    assert "no prompts to sample, or sample.every = 0" in capsys.readouterr().err
