"""What commands print: for a reader, and with --json for a program."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.render import resolved
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.output import Printable

MODULE = "lora_unet_output_blocks_8_0_skip_connection"


@pytest.fixture
def lora(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "l.safetensors"
    tensors = {
        f"{MODULE}.lora_down.weight": rng.standard_normal((2, 64, 1, 1)),
        f"{MODULE}.lora_up.weight": rng.standard_normal((32, 2, 1, 1)),
        f"{MODULE}.alpha": np.array(2.0),
    }
    said_of_itself = {"ss_base_model_version": "sdxl_base_v1-0"}
    save_file(path, {name: array.astype(np.float32) for name, array in tensors.items()}, said_of_itself)
    return path


@pytest.fixture
def config_file(small_config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(resolved(small_config()))
    return path


@pytest.fixture
def said(capsys):
    """What the program prints on standard output for a line that ends well: text, or with --json the value."""

    def of(*arguments):
        assert cli.run([str(a) for a in arguments]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in arguments else out

    return of


def test_inspect(said, lora):
    assert "LoRA for SDXL, kohya names" in said("inspect", lora)
    found = said("inspect", lora, "--json")
    assert (found["path"], found["identity"]["kind"], found["tensors"]) == (str(lora), "lora", 3)


def test_convert(said, lora, tmp_path):
    text = said("convert", lora, tmp_path / "a.safetensors", "--to", "diffusers")
    assert "modules:\n  unet: 1\n" in text
    assert "dropped_metadata: none\n" in text
    found = said("convert", lora, tmp_path / "b.safetensors", "--to", "diffusers", "--json")
    assert (found["to"], found["tensors"], found["target"]) == ("diffusers", 2, str(tmp_path / "b.safetensors"))


def test_inspect_names_a_format_as_convert_does(said, lora, tmp_path):
    said("convert", lora, tmp_path / "out.safetensors", "--to", "diffusers")
    assert "LoRA for SDXL, diffusers names" in said("inspect", tmp_path / "out.safetensors")


def test_merge(said, lora, small_base, tmp_path):
    text = said("merge", small_base, lora, tmp_path / "a.safetensors", "--strength", "0.5")
    assert "changed_tensors: 1\n" in text
    assert "strength: 0.5\n" in text
    found = said("merge", small_base, lora, tmp_path / "b.safetensors", "--json")
    assert (found["changed_tensors"], found["skipped"]) == (1, {})


def test_a_plan_shows_the_buckets_as_a_table(said, config_file):
    lines = said("sdxl-lora", "--config", config_file, "--device", "cpu", "--dry-run").splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["bucket", "images"])
    rows = [line.split()[:2] for line in lines[head + 1 : head + 4]]
    assert sorted(rows) == [["128x64", "3"], ["64x128", "3"], ["96x96", "6"]]
    assert not any("96x96-01.png" in line for line in lines)


def test_a_plan_as_json_has_every_image(said, config_file):
    plan = said("sdxl-lora", "--config", config_file, "--device", "cpu", "--dry-run", "--json")
    assert sorted((row["bucket"], row["images"]) for row in plan["buckets"]) == [
        ("128x64", 3),
        ("64x128", 3),
        ("96x96", 6),
    ]
    assert len(plan["files"]) == plan["images"] == 12


def test_a_plan_writes_nothing(said, config_file, tmp_path, drawn):
    before = set(tmp_path.rglob("*"))
    said("sdxl-lora", "--config", config_file, "--device", "cpu", "--dry-run")
    said("cache", "--config", config_file, "--device", "cpu", "--dry-run")
    assert set(tmp_path.rglob("*")) == before


def test_cache_counts_what_it_made_and_what_it_kept(said, config_file):
    first, second = (said("cache", "--config", config_file, "--device", "cpu", "--json") for _ in range(2))
    assert (first["encoded"], first["kept"]) == (25, 0)
    assert (second["encoded"], second["kept"]) == (0, 25)


ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m"


def test_what_a_file_says_of_itself_cannot_steer_a_terminal(lora, tmp_path, capsys):
    """Names of tensors and files, and metadata, are a stranger's; ESC begins what a terminal obeys."""
    with SafetensorsFile(lora) as file:
        tensors = {name.replace("skip", f"skip{ESCAPES}"): np.array(file.read(name)) for name in file.names}
    path = tmp_path / f"l{ESCAPES.replace('/', '')}.safetensors"
    save_file(path, tensors, {"ss_base_model_version": "sdxl_base_v1-0", f"k{ESCAPES}": ESCAPES})
    config = tmp_path / "x.yaml"
    config.write_text('"lo\\e[2J": {"\\a": 1}\ndata: {path: "\\e[2J\\n\\x07"}\n')
    lines = [["inspect", str(path)], ["convert", str(path), str(tmp_path / "o.safetensors"), "--to", "kohya"]]
    for line in (
        *lines,
        ["sdxl-lora", "--config", str(config), "--device", "cpu"],
        ["inspect", str(tmp_path / "\x1b")],
    ):
        cli.run(line)
        out, err = capsys.readouterr()
        assert all(part.isprintable() for part in (out + err).split("\n")), (out, err)
        assert "x1b" in out + err


def test_notes_of_the_log_cannot_either(capsys):
    record = logging.LogRecord("flame_train", logging.WARNING, "", 0, "%s: left out", (ESCAPES,), None)
    assert Printable().format(record) == "\\x1b]0;title\\x07\\x1b[2J\\u202e\\x9b31m: left out"
