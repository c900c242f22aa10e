"""What convert, merge and sample write: never over another file unasked, and never under a wrong ending."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train import cli
from flame_train.io.safetensors import SafetensorsFile, save_file

MODULE = "lora_unet_output_blocks_8_0_skip_connection"
ENDINGS = {"merge": ".safetensors", "convert": ".safetensors", "sample": ".png"}


@pytest.fixture
def lines(small_base, tmp_path):
    """The command lines, given the name of what is written."""
    with SafetensorsFile(small_base) as file:
        out, into, *_ = file.info("model.diffusion_model.output_blocks.8.0.skip_connection.weight").shape
    lora = tmp_path / "lora.safetensors"
    shapes = {"lora_down.weight": (2, into, 1, 1), "lora_up.weight": (out, 2, 1, 1), "alpha": ()}
    tensors = {f"{MODULE}.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(lora, tensors, {"ss_base_model_version": "sdxl_base_v1-0"})
    drawing = ["--width", "32", "--height", "32", "--steps", "1", "--precision", "fp32", "--device", "cpu"]
    return {
        "merge": lambda path: ["merge", str(small_base), str(lora), str(path)],
        "convert": lambda path: ["convert", str(lora), str(path), "--to", "diffusers"],
        "sample": lambda path: ["sample", "-m", str(small_base), "-p", "x", "-o", str(path), *drawing],
    }


@pytest.mark.parametrize("command", ENDINGS)
def test_what_is_there_stays_unless_forced(lines, tmp_path, command, capsys):
    path = tmp_path / f"mine{ENDINGS[command]}"
    path.write_text("mine")
    assert cli.run(lines[command](path)) == 6
    assert "exists already and would be overwritten" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert cli.run([*lines[command](path), "--force"]) == 0
    assert path.stat().st_size > len("mine")


@pytest.mark.parametrize("command", ENDINGS)
@pytest.mark.parametrize("name", ["out.ckpt", "out", "out.jpg"])
def test_a_name_that_ends_otherwise_is_refused(lines, tmp_path, command, name, capsys):
    assert cli.run([*lines[command](tmp_path / name), "--force"]) == 2
    assert f"expected a name ending in {ENDINGS[command]}" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("command", ENDINGS)
@pytest.mark.parametrize("obstacle", ["is a file", "is a link to elsewhere, which is not there"])
def test_a_place_where_nothing_can_be_written_is_told_before_anything_is_read(
    lines, tmp_path, command, obstacle, capsys
):
    path = tmp_path / "there" / f"out{ENDINGS[command]}"
    if "link" in obstacle:
        path.parent.symlink_to("elsewhere")
    else:
        path.parent.write_text("mine")
    inputs_gone = [
        "gone.safetensors" if a.endswith(".safetensors") and a != str(path) else a for a in lines[command](path)
    ]
    assert cli.run(inputs_gone) == 6
    assert f"expected a folder, but {path.parent} {obstacle}; choose another place" in capsys.readouterr().err
