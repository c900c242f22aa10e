"""Whatever is wrong with sets, images, captions, masks and prompts stands in one report, before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train import cli

CONFIG = """
[model]
checkpoint = "{base}"
[data]
resolution = 64
bucket_step = 32
masks = "files"
[captions]
wildcards = true
[[data.sets]]
path = "{tmp}/a"
weight = 0
[[data.sets]]
path = "{tmp}/b"
weight = 0
[[data.sets]]
path = "{tmp}/empty"
weight = 0
[[data.sets]]
path = "{tmp}/held"
validation = true
[sample]
prompt_file = "{tmp}/prompts.txt"
[train]
precision = "fp32"
[output]
dir = "{tmp}/run"
"""

WRONG = {
    "weights that sum to 0": "data.sets: expected a weight above 0",
    "a prompt file with an unknown flag": "prompts.txt:1: unknown flag --q",
    "a mask of another size": "0.mask.png: a mask of 50x50 pixels for 0.png of 96x96",
    "a set without images": "empty: 1 problem in the dataset:\n  no usable image",
    "a wildcard that does not close": "1.png: its caption: the wildcard that begins at character 3 does not close",
    "a validation image that is trained on": "held/9.png: is the same image as",
}


@pytest.fixture
def config(tmp_path: Path, small_base: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a", "b", "held", "empty"):
        (tmp_path / name).mkdir()
        for number in range(0 if name == "empty" else 3):
            Image.fromarray(rng.integers(0, 256, (96, 96, 3), np.uint8)).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text("a cat")
    Image.fromarray(np.zeros((50, 50), np.uint8)).save(tmp_path / "a/0.mask.png")
    (tmp_path / "b/1.txt").write_text("a {red|blue cat")
    shutil.copy(tmp_path / "a/1.png", tmp_path / "held/9.png")
    (tmp_path / "held/9.txt").write_text("a cat")
    (tmp_path / "prompts.txt").write_text("a cat --q 3\n")
    path = tmp_path / "bad.toml"
    path.write_text(CONFIG.format(base=small_base, tmp=tmp_path))
    return path


def test_all_of_it_is_told_at_once(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--config", str(config), "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert [what for what, said in WRONG.items() if said not in told] == []
    assert f"{config}:11: data.sets 1: " in told
    assert not (tmp_path / "run").exists()


def test_so_is_what_the_images_alone_have(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("weight = 0", "").replace("prompt_file", "# prompt_file"))
    assert cli.run(["train", "--config", str(config), "--device", "cpu", "--dry-run"]) == 3
    told = capsys.readouterr().err
    assert [what for what, said in list(WRONG.items())[2:] if said not in told] == []


def test_a_validation_sets_weight_is_none_to_train_with(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text().replace("validation = true", "validation = true\nweight = 2")
    config.write_text(text)
    assert cli.run(["train", "--config", str(config), "--device", "cpu"]) == 2
    assert "weights that sum to 0" in capsys.readouterr().err


def test_checkpoint_images_and_run_folder_are_told_in_one_report(tmp_path, small_base, capsys):
    """With a code of their kind where they are of one, and no `disk is full` for a folder that cannot be."""
    (tmp_path / "images").mkdir()
    for number in range(5):
        Image.effect_noise((64, 64), 20.0).convert("RGB").save(tmp_path / "images" / f"{number}.png")

    def told(**places):
        given = {"model.checkpoint": small_base, "data.path": tmp_path / "images", "output.dir": tmp_path / "run"}
        text = "".join("[{}]\n{} = '{}'\n".format(*key.split("."), value) for key, value in (given | places).items())
        (tmp_path / "config.toml").write_text(text)
        code = cli.run(["train", str(tmp_path / "config.toml"), "--device", "cpu"])
        return code, capsys.readouterr().err.splitlines()

    wrong = {"model.checkpoint": tmp_path / "no.safetensors", "output.dir": tmp_path / "config.toml" / "run"}
    code, lines = told(**wrong)
    assert code == 2
    starts = [f"error: {tmp_path}/config.toml:2: model.checkpoint: {tmp_path}/no.safetensors: expected a"]
    starts += [f"{tmp_path}/config.toml:4: data.path: {tmp_path}/images: 5 problems in the dataset:"]
    starts += [
        "  5 images, such as 0.png, 1.png, 2.png, have no caption: write NAME.txt in the same folder, or set data.ca"
    ]
    starts += [f"{tmp_path}/config.toml:6: output.dir: {tmp_path}/config.toml/run: expected a folder"]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert told(**{"data.path": tmp_path / "no"} | wrong)[0] == 2
    assert told(**{"model.checkpoint": tmp_path / "no.safetensors"})[0] == 2
    (tmp_path / "images" / "4.png").unlink()
    assert told()[0] == 3
    if Path("/proc/self").exists():
        code, lines = told(**{"output.dir": "/proc/x/y"})
        assert code == 2
        assert "output.dir: /proc/x/y: cannot be made: /proc is the system's own and holds no files" in lines[-1]
