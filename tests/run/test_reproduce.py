"""`reproduce` trains a LoRA file's run again to the same bytes, or says what differs."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.render import resolved
from flame_train.errors import ConfigError, DataError, ModelFileError, OutputError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.run.commands.reproduce import Written, reproduce
from flame_train.run.commands.stages import train


@pytest.fixture
def made(small_config, tmp_path):
    """A run's config file and its LoRA."""

    def run(**sections):
        config = tmp_path / "config.toml"
        config.write_text(resolved(small_config(**sections)))
        return str(config), Path(train(str(config), [], "cpu", False)["lora"])

    return run


def test_the_same_bytes_come_out(made, tmp_path):
    config, lora = made()
    result = reproduce(lora, config, [], tmp_path / "again", "cpu", False)
    assert Path(result["reproduced"]).read_bytes() == lora.read_bytes()
    assert Path(result["reproduced"]) == tmp_path / "again" / "run" / "lora.safetensors"
    with pytest.raises(OutputError, match="holds the finished run already"):
        reproduce(lora, config, [], tmp_path / "again", "cpu", False)


def test_the_second_file_of_a_run_is_reproduced_too(made, tmp_path):
    config, lora = made(output={"format": "both", "precision": "fp32"})
    beside = lora.with_name("lora.diffusers.safetensors")
    result = reproduce(beside, config, [], tmp_path / "again", "cpu", False)
    assert Path(result["reproduced"]).read_bytes() == beside.read_bytes()


@pytest.mark.parametrize("settings", ["[]", "null", "5", "{", "[" * 9000, '"x"'])
@pytest.mark.parametrize("steps", ["2", "x", "9" * 5000, "1e999"])
def test_metadata_that_no_run_writes_is_refused(tmp_path, settings, steps):
    said = {"flame_train_config": settings, "flame_train_dataset_hash": "x", "ss_steps": steps}
    said["flame_train_config_hash"] = hashlib.sha256(settings.encode()).hexdigest()
    save_file(tmp_path / "l.safetensors", {"x": np.zeros(1, np.float32)}, said)
    with pytest.raises(ModelFileError, match="is not what flame-train writes"):
        Written.read(tmp_path / "l.safetensors")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=0.5", r"optimizer\.lr +0\.0001 +0\.5"),
        ("train.steps=5", r"train\.steps +2 +5"),
        ("lora.kind=loha", r"lora\.kind +lora +loha"),
        ("output.precision=fp32", r"output\.precision +bf16 +fp32"),
        ("output.format=diffusers", r"output\.format +kohya +diffusers"),
        ("output.author=me", r"modelspec\.author +- +me"),
    ],
)
def test_other_settings_are_told_before_anything_is_trained(made, tmp_path, override, words):
    config, lora = made()
    with pytest.raises(ConfigError, match=rf"was trained with other settings than this config's:\n(.*\n)*.*{words}"):
        reproduce(lora, config, [override], tmp_path / "again", "cpu", False)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("key", ["path", "sets"])
def test_other_captions_are_told(made, tmp_path, drawn, key):
    """With the folder, in whichever key it stands."""
    config, lora = made(data={} if key == "path" else {"path": "", "sets": ({"path": str(drawn)},)})
    assert reproduce(lora, config, [], tmp_path / "again", "cpu", True)["differences"] == 0
    next(drawn.glob("*.txt")).write_text("something else")
    said = rf"its images or captions are not those of data\.{key}: {re.escape(str(drawn))}"
    with pytest.raises((ConfigError, DataError), match=said):
        reproduce(lora, config, [], tmp_path / "again", "cpu", True)


def test_a_file_that_says_too_little_is_refused(made, tmp_path):
    config, lora = made()
    with SafetensorsFile(lora) as file:
        tensors, metadata = {name: file.read(name) for name in file.names}, dict(file.metadata)
    bare, edited = tmp_path / "bare.safetensors", tmp_path / "edited.safetensors"
    save_file(bare, tensors, {})
    save_file(edited, tensors, metadata | {"flame_train_config": "{}"})
    for path, words in ((bare, "without flame_train_config"), (edited, "it was edited")):
        with pytest.raises(ModelFileError, match=words):
            reproduce(path, config, [], tmp_path / "again", "cpu", True)


def test_bytes_that_come_out_otherwise_are_told(made, tmp_path):
    config, lora = made()
    with SafetensorsFile(lora) as file:
        tensors, metadata = {name: file.read(name).copy() for name in file.names}, dict(file.metadata)
    name = next(n for n in tensors if n.endswith("lora_down.weight"))
    tensors[name] = -tensors[name]
    other = tmp_path / "other.safetensors"
    save_file(other, tensors, metadata)
    with pytest.raises(ModelFileError, match=rf"1 of {len(tensors)} tensors differ, {name} by 2\.0e\+00 of its norm"):
        reproduce(other, config, [], tmp_path / "again", "cpu", False)


def test_the_command_exits_with_the_codes_of_its_errors(made, tmp_path, capsys):
    config, lora = made()
    command = ["reproduce", str(lora), "-c", config, "--device", "cpu", "-o", str(tmp_path / "again")]
    assert cli.run([*command, "--set", "optimizer.lr=0.5"]) == 2
    assert cli.run(["reproduce", str(tmp_path / "none.safetensors"), *command[2:]]) == 3
    assert cli.run(command) == 0
    assert cli.run(command) == 6
    capsys.readouterr()
