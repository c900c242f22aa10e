"""`flame_train.train`: a run from Python code, beside the same run without a listener."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flame_train
from flame_train.config.render import flat
from flame_train.errors import ConfigError
from tests.run_files import lora_of


def sections(config, folder):
    """A config as Python code gives it."""
    given: dict[str, dict[str, object]] = {}
    for path, value in flat(config).items():
        section, key = path.split(".")
        given.setdefault(section, {})[key] = value
    given["output"]["dir"] = folder
    return given


def test_a_run_tells_its_listeners_and_trains_the_same_bytes(small_config, tmp_path):
    config = small_config(
        train={"precision": "fp32", "steps": 2},
        sample={"every": 2, "steps": 1, "prompts": ("a circle",)},
        log={"gradients_every": 1},
    )
    told = []
    result = flame_train.train(
        sections(config, tmp_path / "told"),
        overrides=["train.steps=3"],
        device="cpu",
        on_step=lambda record: told.append((record["step"], sorted(record["gradients"])[0])),
        on_checkpoint=lambda step, folder: told.append((step, folder.name)),
        on_sample=lambda step, file: told.append((step, file.name)),
    )
    assert Path(result["lora"]).exists()
    assert [what for _, what in told if "." in what and "png" in what] == ["step-000000.png", "step-000002.png"]
    assert [step for step, _ in told] == [0, 1, 2, 2, 3, 3]
    assert told[-1] == (3, "step-000003")
    flame_train.train(sections(config, tmp_path / "alone"), overrides=["train.steps=3"], device="cpu")
    assert lora_of(tmp_path / "told") == lora_of(tmp_path / "alone")


TRAINS = """
import json, sys
import flame_train
flame_train.train(json.loads(sys.argv[1]), device="cpu")
print(json.dumps([m for m in sys.modules if m.startswith("flame_train.engine.library") or m == "benchmarks"]))
"""


def test_a_run_loads_nothing_of_the_engine_s_library(small_config, tmp_path):
    config = small_config(
        train={"precision": "fp32", "steps": 1},
        lora={"kind": "dora"},
        loss={"kind": "huber"},
        sample={"every": 1, "steps": 1, "prompts": ("a circle",)},
    )
    given = json.dumps(sections(config, str(tmp_path / "run")), default=str)
    ended = subprocess.run([sys.executable, "-c", TRAINS, given], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
    assert (tmp_path / "run" / "lora.safetensors").exists()


def test_sections_may_be_those_of_a_file_with_its_format():
    with pytest.raises(ConfigError, match=r"lora\.rnak: unknown key"):
        flame_train.train({"format": 1, "lora": {"rnak": 4}}, device="cpu")
    with pytest.raises(ConfigError, match=r"the given config: format: expected 1, .* got 2"):
        flame_train.train({"format": 2}, device="cpu")


@pytest.mark.parametrize("overrides", [5, "train.steps=4", [5]])
def test_what_are_no_overrides_is_refused(overrides):
    with pytest.raises(ConfigError, match="as overrides"):
        flame_train.train({}, overrides=overrides, device="cpu")


def test_what_is_wrong_is_told_without_a_file():
    with pytest.raises(ConfigError, match=r"the given config: lora\.rnak: unknown key; did you mean lora\.rank\?"):
        flame_train.train({"lora": {"rnak": 4}}, device="cpu")


@pytest.mark.parametrize("config", [5, None, b"my.toml", ["my.toml"], object()])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(
        TypeError, match=rf"flame_train\.train: expected the config's file, .*, got {type(config).__name__}"
    ):
        flame_train.train(config)


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="on_step: expected a function of 1"):
        flame_train.train("not_there.toml", on_step=lambda: None)


def status(folder):
    return json.loads((folder / "status.json").read_text())


def test_a_callback_stops_a_run_saved_and_the_same_call_goes_on(small_config, tmp_path, capfd):
    config = small_config(train={"precision": "fp32", "steps": 4}, sample={"every": 0})
    cut = sections(config, tmp_path / "cut")
    stopped = flame_train.train(
        cut, device="cpu", quiet=True, on_step=lambda record: flame_train.STOP if record["step"] == 1 else None
    )
    assert capfd.readouterr().err == ""
    assert (stopped["stopped"], stopped["steps"]) == (True, 2), "a step is heard of while the next one runs"
    assert Path(stopped["lora"]).exists()
    assert (status(tmp_path / "cut")["state"], status(tmp_path / "cut")["saved"]) == ("interrupted", 2)
    with pytest.raises(ZeroDivisionError):
        flame_train.train(cut, device="cpu", on_step=lambda record: 1 // (3 - record["step"]))
    assert status(tmp_path / "cut")["saved"] == 4
    assert "stopped" not in flame_train.train(cut, device="cpu", on_checkpoint=lambda *_: flame_train.STOP)
    flame_train.train(sections(config, tmp_path / "whole"), device="cpu")
    assert lora_of(tmp_path / "cut") == lora_of(tmp_path / "whole")


def test_what_a_callback_raises_at_the_last_step_is_raised_too(small_config, tmp_path):
    def leave(*_):
        raise KeyboardInterrupt

    given = sections(small_config(train={"precision": "fp32", "steps": 1}), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        flame_train.train(given, device="cpu", on_checkpoint=leave)
    assert (tmp_path / "run" / "lora.safetensors").exists()


@pytest.mark.parametrize(
    ("wrong", "words"), [({"quiet": 1}, "quiet: expected True or False, got int"), ({"device": "gpu"}, "'cuda:1', got")]
)
def test_wrong_arguments_are_refused_before_anything_is_read(wrong, words):
    with pytest.raises((TypeError, ConfigError), match=words):
        flame_train.train("not_there.toml", **wrong)
