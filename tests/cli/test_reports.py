"""What commands print: for a reader, and with --json for a program."""

from __future__ import annotations

import inspect
import json
import logging
import re

import numpy as np
import pytest

from flame_train import cli
from flame_train.commands.output import Printable, show
from flame_train.config.keys import keys
from flame_train.config.render import resolved
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.run.commands.describe import as_text
from flame_train.run.finish.finish import sample_options
from flame_train.tools.lora_files import size_of

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
    assert text.startswith(
        f"{tmp_path}/a.safetensors: {size_of(tmp_path / 'a.safetensors')}, with names of diffusers\n"
    )
    assert "2 tensors; layers: 1 in unet\n" in text
    assert re.search(r"\n  diffusers \S+ \(\S+\): yes, 2 tensors taken, 0 not\n", text)
    found = said("convert", lora, tmp_path / "b.safetensors", "--to", "diffusers", "--json")
    assert [one["verdict"] for one in found["programs"] if one["program"] == "diffusers"] == ["yes"]
    assert (found["to"], found["tensors"], found["target"]) == ("diffusers", 2, str(tmp_path / "b.safetensors"))


def test_inspect_names_a_format_as_convert_does(said, lora, tmp_path):
    said("convert", lora, tmp_path / "out.safetensors", "--to", "diffusers")
    assert "LoRA for SDXL, diffusers names" in said("inspect", tmp_path / "out.safetensors")


def test_merge(said, lora, small_base, tmp_path):
    text = said("merge", small_base, lora, tmp_path / "a.safetensors", "--strength", "0.5")
    assert "1 tensor changed; layers: 1 in unet" in text
    assert "at strength 0.5\n" in text
    found = said("merge", small_base, lora, tmp_path / "b.safetensors", "--json")
    assert (found["changed_tensors"], found["skipped"]) == (1, {})


DRY = ("--device", "cpu", "--dry-run")


def test_resize_and_merge_say_how_far_they_are_from_the_original(said, lora, tmp_path):
    text = said("resize", lora, "--rank", "1", "-o", tmp_path / "small.safetensors")
    lines = text.splitlines()
    small = tmp_path / "small.safetensors"
    assert lines[0] == f"{small}: {size_of(small)}, rank 1"
    assert lines[1] == f"before: {lora}: {size_of(lora)}, rank 2"
    with SafetensorsFile(lora) as file:
        down, up = (file.read(f"{MODULE}.lora_{side}.weight").squeeze() for side in ("down", "up"))
    values = np.linalg.svd(up @ down, compute_uv=False)
    share = f"{100 * values[1] / np.linalg.norm(values):.3g} %"
    assert lines[2].startswith(f"difference from the original: {share} (worst layer {share}, unet ")
    assert lines[3].startswith("that is much: ")
    text = said("merge", "--to", "lora", "--lora", lora, "-o", tmp_path / "sum.safetensors")
    assert "difference from the original: none but the rounding of the file's numbers\n" in text


def test_a_plan_is_grouped_and_ends_in_a_verdict(said, config_file):
    lines = said("sdxl-lora", "--config", config_file, *DRY).splitlines()
    assert [line for line in lines if line and not line.startswith(" ")][:3] == ["Training", "Images", "Memory"]
    rows = {line.split("  ")[1]: line.strip() for line in lines if line.startswith("  ")}
    for size, images in {"128x64": 3, "64x128": 3, "96x96": 6}.items():
        assert re.match(rf"{size} pixels +{images} images, scaled by 1\.00", rows[f"{size} pixels"])
    assert "GiB of weights wait there, of" in rows["host"]
    assert re.fullmatch(r"Runs on the CPU\. Fits a card of 4 GB: it takes 1\.\d\d GiB\.", lines[-1])
    assert not any("96x96-01.png" in line or " ms a step" in line for line in lines)


def test_a_plan_names_the_card_that_its_time_is_of(said, config_file):
    text = said("train", config_file, "--dry-run")
    assert re.search(r"time +[\d.]+ ms a step on an H200\n", text)
    assert text.endswith("GiB. No GPU is here.\n")


def test_a_budget_is_planned_for_without_a_gpu(said, config_file):
    text = said("train", config_file, *DRY, "--memory", "2")
    assert re.search(r"\nFits memory\.budget: it takes 1\.\d\d GiB of 2\.00 GiB\.\n$", text)
    plan = said("train", config_file, *DRY, "--memory", "2", "--json")
    assert (plan["memory_budget_gib"], plan["chosen_for_the_budget"], plan["fits"]) == (2.0, [], True)


@pytest.mark.parametrize(
    ("room", "verdict"),
    [(24.0, "Fits cuda:0 (a card) with 24.00 GiB: it takes"), (1.0, "Does not fit cuda:0 (a card) with 1.00 GiB:")],
)
def test_the_verdict_is_of_the_card_that_is_there(said, config_file, room, verdict):
    plan = said("train", config_file, "--dry-run", "--json")
    here = plan | {"gpu": {"name": "cuda:0 (a card)", "memory_gib": room}, "fits": room > 2}
    assert as_text(here).splitlines()[-1].startswith(verdict)


def test_a_plan_as_json_has_numbers_under_names_of_a_kind(said, config_file):
    plan = said("sdxl-lora", "--config", config_file, *DRY, "--json")
    assert plan["format"] == 1
    assert sorted((row["bucket"], row["images"]) for row in plan["buckets"]) == [
        ("128x64", 3),
        ("64x128", 3),
        ("96x96", 6),
    ]
    assert len(plan["files"]) == plan["images"] == 12
    assert plan["adapter"] == {"kind": "lora", "rank": plan["adapter"]["rank"], "alpha": plan["adapter"]["alpha"]}
    names = {*plan, *plan["adapter"], *plan["optimizer"], *plan["buckets"][0], *plan["files"][0]}
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    prose = {name for name, value in plan.items() if isinstance(value, str) and " " in value}
    assert not prose - {"checkpoint", "output"}
    assert (plan["predicted_step_ms"], plan["fits"], plan["smallest_card_gb"]) == (None, None, 4)


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


def test_a_table_shows_names_as_they_are(capsys):
    """No markup and no emoji codes are read in it: names are the user's."""
    show({"runs": [{"name": "a :x: b", "prompt": "[red]<lora:x:1>[/red]"}]}, as_json=False)
    assert "a :x: b" in (said := capsys.readouterr().out)
    assert "[red]<lora:x:1>[/red]" in said


def test_the_command_that_a_run_prints_carries_each_key_that_sample_has_an_option_for():
    """With the same default, so that what is not carried is the same."""
    options, own = inspect.signature(cli.sample).parameters, sample_options()
    for option, path in own.items():
        default = options[option.removeprefix("--").replace("-", "_")].default
        assert default == keys()[path].default or (path, default) == ("model.prediction", None)
    named = {f"--{path.partition('.')[2].replace('_', '-')}" for path in keys() if path.startswith(("model.", "text_"))}
    assert {f"--{name.replace('_', '-')}" for name in options} & named <= own.keys() | {"--checkpoint", "--lora"}
    assert {"--clip", "--t5", "--qwen3", "--mistral", "--qwen3-tokens", "--kontext"} <= own.keys()
