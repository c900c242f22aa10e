"""`quickstart` as a user meets it: one command, and everything it promised is there."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from flame_train import cli
from flame_train.config.load import load
from flame_train.models.registry import FAMILIES
from flame_train.quickstart import first_run as quickstart
from flame_train.quickstart.page import grid_images
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import make_plan
from flame_train.tools.init import template
from flame_train.training.session import StopRequest
from tests.run_files import log_of

ROOT = Path(__file__).parents[2]


def run_command(folder, *arguments):
    """The command in a process of its own, with every GPU hidden."""
    return subprocess.run(
        [sys.executable, "-m", "flame_train", "quickstart", str(folder), "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A finished quickstart: its folder, and how the command ended."""
    folder = tmp_path_factory.mktemp("quickstart") / "a new one"
    return folder, run_command(folder)


@pytest.fixture(scope="module")
def shorter():
    """Sixteen steps of the lesson, of half as many images, and grids from four steps."""
    sdxl = FAMILIES["sdxl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sdxl), "lesson", replace(sdxl.lesson, known=40, steps=16, batch_size=4))
        patch.setattr("flame_train.quickstart.first_run._DRAWN_IN", 4)
        patch.setattr(quickstart, "_HELD_OUT", {"new": 8, "known": 8})
        yield


@pytest.fixture(scope="module")
def done(shorter, tmp_path_factory):
    """A finished quickstart of the shorter lesson, run in this process: its folder, and how the command ended."""
    folder = tmp_path_factory.mktemp("quickstart") / "a new one"
    return folder, run_here(folder)


def run_here(folder):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(["quickstart", str(folder), "--json", "--device", "cpu"])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def test_it_ends_well_and_says_where_everything_is(done):
    folder, ended = done
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    for name, path in {
        "lora": "run/lora.safetensors",
        "log": "run/log.jsonl",
        "image": "before-after.png",
        "config": "config.toml",
    }.items():
        assert said[name] == str(folder / path)
        assert (folder / path).is_file()
    counts = {"4_tiles": 10, "1_known": 40}
    for ending in ("png", "txt"):
        assert {name: len(list((folder / "images" / name).glob(f"*.{ending}"))) for name in counts} == counts
    another, own = said["next"]
    assert shlex.split(another)[2:7] == ["flame-train", "sample", "-m", str(folder / "base.safetensors"), "--lora"]
    assert own.startswith("your own LoRA: flame-train init sdxl ")
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "done"


@pytest.mark.proof
def test_the_whole_of_it_learns_and_does_not_forget(learned):
    """On images never trained on: the loss of the new style fell by 30 %, that of known ones rose by 5 % at most."""
    folder, ended = learned
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["device"] == "cpu"
    assert ended.stderr.startswith("device: cpu")
    loss = said["held_out_loss"]
    assert loss["new"]["after"] <= 0.7 * loss["new"]["before"]
    assert loss["known"]["after"] <= 1.05 * loss["known"]["before"]
    lines = log_of(folder / "run")
    assert [line["step"] for line in lines] == list(range(1, 201))


@pytest.mark.slow
def test_it_says_which_device_it_took(done):
    _, ended = done
    assert json.loads(ended.stdout)["device"] == "cpu"
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_it_learns_and_does_not_forget(done):
    """On images never trained on: the loss of the new style fell, that of known ones rose little."""
    folder, ended = done
    loss = json.loads(ended.stdout)["held_out_loss"]
    assert loss["new"]["after"] <= 0.9 * loss["new"]["before"]
    assert loss["known"]["after"] <= 1.3 * loss["known"]["before"]
    lines = log_of(folder / "run")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)


@pytest.mark.slow
def test_the_lora_is_a_plain_kohya_file(done):
    folder, _ = done
    tensors = safetensors.numpy.load_file(folder / "run" / "lora.safetensors")
    ups = [array for name, array in tensors.items() if name.endswith("lora_up.weight")]
    assert all(name.startswith("lora_unet_") for name in tensors)
    assert len(ups) * 3 == len(tensors)
    assert all(np.isfinite(array).all() for array in tensors.values())
    assert sum(bool(array.any()) for array in ups) > 0.9 * len(ups)


@pytest.mark.slow
def test_the_page_shows_what_was_taught_and_each_prompt_before_and_after(done):
    """Each sample image stands enlarged in its place."""
    folder, _ = done
    first, last = drawn_in(folder)
    with Image.open(folder / "before-after.png") as image:
        sheet = image.convert("RGB")
    assert sheet.width >= 1000
    for row in (first, last):
        assert all(_stands_in(sheet, column, pixels) for column, pixels in enumerate(row))


def drawn_in(folder):
    """The images of the first and the last grid, in the prompts' order."""
    lesson = FAMILIES["sdxl"].lesson
    grids = sorted((folder / "run" / "samples").glob("*.png"))
    return ([shown.pixels for shown in grid_images(path, (*lesson.prompts, *lesson.known_prompts))] for path in grids)


def _stands_in(sheet, column, pixels):
    """Whether a part of the page's column, made as small as the image again, is nearly the image."""
    side = 168
    left = 20 + column * (side + 12)
    for top in range(sheet.height - side):
        part = sheet.crop((left, top, left + side, top + side)).resize(pixels.shape[1::-1], Image.Resampling.BOX)
        if np.abs(np.asarray(part).astype(int) - pixels).mean() < 2:
            return True
    return False


@pytest.mark.proof
def test_every_new_prompt_shows_the_style(learned):
    """Blue on white checks, seen from the image alone. New prompts' images changed, those of known ones hardly."""
    folder, _ = learned
    first, last = drawn_in(folder)
    new = len(FAMILIES["sdxl"].lesson.prompts)
    assert all(_checks(pixels) for pixels in last[:new])
    assert not any(_checks(pixels) for pixels in last[-2:])
    changed = [np.abs(a.astype(int) - b).mean() for a, b in zip(first, last, strict=True)]
    assert min(changed[:new]) > 20
    assert max(changed[new:]) < 20


def _checks(pixels):
    """Whether the image's border is in squares of 16 pixels, white and gray by turns."""
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]]
    odd = (x // 16 + y // 16) % 2
    border = (np.minimum(x, x[:, ::-1]) < 8) | (np.minimum(y, y[::-1]) < 8)
    light = pixels.mean(-1)
    gray = np.ptp(pixels, -1) < 40
    between = light[border & (odd == 0)].mean() - light[border & (odd == 1)].mean()
    return gray[border].mean() > 0.9 and abs(between) > 50


@pytest.mark.slow
def test_run_again_it_finds_everything_done(done, caplog):
    folder, first = done
    held = (folder / "run" / "lora.safetensors").read_bytes()
    with caplog.at_level("INFO"):
        again = run_here(folder)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "done already" in caplog.text
    assert (folder / "run" / "lora.safetensors").read_bytes() == held


@pytest.mark.slow
def test_its_config_is_one_for_the_ordinary_command(done, capsys):
    folder, _ = done
    line = ["sdxl-lora", "--config", str(folder / "config.toml"), "--device", "cpu", "--dry-run", "--json"]
    assert cli.run(line) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["images"], len(plan["buckets"])) == (50, 3)


@pytest.mark.parametrize("name", ["notes.md", "config.toml", "ABOUT.txt"])
def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    assert cli.run(["quickstart", str(tmp_path), "--device", "cpu"]) == 6
    assert "name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_file_in_the_place_of_the_folder(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("mine")
    assert cli.run(["quickstart", str(tmp_path / "c.toml"), "--device", "cpu"]) == 6
    said = capsys.readouterr().err
    assert "flame-train quickstart DIR" in said
    assert "output.dir" not in said


def test_a_folder_whose_name_no_config_can_hold_is_refused_before_anything_is_made(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"new-\xff")
    assert cli.run(["quickstart", str(folder), "--family", "flux", "--device", "cpu"]) == 2
    assert "expected a name in UTF-8" in capsys.readouterr().err
    assert not folder.exists()


def test_a_folder_that_was_copied_is_not_run_in_the_first_one(tmp_path, capsys):
    for name in ("one", "two"):
        quickstart.lay(tmp_path / name, "cpu", FAMILIES["flux"])
    (tmp_path / "two" / "config.toml").write_bytes((tmp_path / "one" / "config.toml").read_bytes())
    assert cli.run(["quickstart", str(tmp_path / "two"), "--family", "flux", "--device", "cpu"]) == 6
    assert f"its output.dir is {tmp_path / 'one' / 'run'}" in capsys.readouterr().err
    assert not (tmp_path / "one" / "run").exists()


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_its_own_images_are_hardly_cropped(tmp_path, family):
    source = quickstart.lay(tmp_path / "new", "cpu", FAMILIES[family])
    with StopRequest() as stop:
        samples = make_plan(check(load(str(source)), FAMILIES[family]), stop).samples
    assert {p.original for p in samples.placements} == {(96, 96), (64, 128), (128, 64)}
    assert samples.notices == ()


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(tmp_path):
    ended = run_command(tmp_path / "new", "--device", "cuda")
    assert ended.returncode == 4
    assert "--device cpu" in ended.stderr
    assert not (tmp_path / "new").exists()


def test_a_config_that_was_changed_is_obeyed(tmp_path, monkeypatch):
    """The folder is laid once; from then on its config is the user's."""
    sdxl = FAMILIES["sdxl"]
    fewer = replace(sdxl.lesson, known=0, steps=6, batch_size=1, prompts=("a delft tile",), known_prompts=())
    monkeypatch.setattr(type(sdxl), "lesson", fewer)
    monkeypatch.setattr("flame_train.quickstart.first_run._DRAWN_IN", 2)
    monkeypatch.setattr(quickstart, "_HELD_OUT", {"new": 4, "known": 4})
    folder = tmp_path / "new"
    quickstart.run(folder, "cpu")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace(f'dir = "{folder / "run"}"', f'dir = "{folder / "other"}"'))
    said = quickstart.run(folder, "cpu")
    assert said["lora"] == str(folder / "other" / "lora.safetensors")
    first, second = (safetensors.numpy.load_file(folder / n / "lora.safetensors") for n in ("run", "other"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_its_config_says_of_each_line_that_differs_why(tmp_path, family):
    """And of no other; the first line says that it is not one to copy."""
    text = quickstart.lay(tmp_path / "new", "cpu", FAMILIES[family]).read_text()
    assert text.startswith("# NOT A CONFIG TO COPY.")
    plain = {(section, setting) for section, setting, _ in _settings(template(family))}
    for section, setting, comment in _settings(text):
        assert ((section, setting) not in plain) == comment.startswith("<-- "), setting


def _settings(text):
    """Section, setting and comment of each line of a template."""
    section = ""
    for line in text.splitlines():
        section = line if line.startswith("[") else section
        setting, _, comment = line.partition("  # ")
        if re.match(r"\w+ = ", setting):
            yield section, setting.strip(), comment


@pytest.mark.parametrize("family", ["sd3", "flux", "krea2"])
def test_a_family_without_a_small_base_draws_nothing_and_says_that_it_is_a_smoke_run(tmp_path, monkeypatch, family):
    found = FAMILIES[family]
    monkeypatch.setattr(type(found), "lesson", replace(found.lesson, steps=6, batch_size=1))
    monkeypatch.setattr(quickstart, "_HELD_OUT", {"new": 4, "known": 4})
    said = quickstart.run(tmp_path / "new", "cpu", family)
    assert said["image"] is None
    assert said["note"].startswith("a smoke run")
    assert not (tmp_path / "new" / "before-after.png").exists()
    assert "before-after" not in (tmp_path / "new" / "ABOUT.txt").read_text()
    assert said["next"] == [f"your own LoRA: flame-train init {family} --preset style -o my.toml"]
