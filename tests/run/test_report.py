"""The report of a run: written at each checkpoint and at the end, and never of any account for the run itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from flame_train.disk.open_folder import FolderLost
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.commands.stages import train
from flame_train.show import trained_images as thumbnails
from flame_train.show.report import Report
from flame_train.show.trained_images import cell_of


@pytest.fixture
def asked(small_base, drawn, tmp_path):
    """asked(name, **sections): a config of four steps with two grids, whose run is in the folder `name`."""

    def make(name="run", **changed):
        sections = {
            "model": {"checkpoint": str(small_base)},
            "data": {"path": str(drawn), "resolution": 96, "bucket_step": 32, "batch_size": 2},
            "lora": {"rank": 2, "alpha": 2.0},
            "train": {"precision": "fp32", "steps": 4},
            "schedule": {"name": "constant"},
            "checkpoint": {"every": 2},
            "log": {"images_every": 2},
            "sample": {"prompts": ["a red circle", "a blue square"], "every": 2, "steps": 2},
            "output": {"dir": str(tmp_path / name)},
        }
        return {n: sections.get(n, {}) | changed.get(n, {}) for n in {**sections, **changed}}

    return make


def weights(folder):
    with SafetensorsFile(folder / "lora.safetensors") as file:
        return {name: np.array(file.read(name)).tobytes() for name in file.names}


def test_it_is_there_at_each_checkpoint_and_has_the_last_grid_at_the_end(asked, tmp_path, monkeypatch):
    seen = []
    make = Report.make
    monkeypatch.setattr(Report, "make", lambda self: seen.append(make(self)) or seen[-1])
    train(asked(), [], "cpu", False)
    assert [len(re.findall(rb"<img ", made["report.html"])) for made in seen] == [2 * 2, 3 * 2]
    assert (tmp_path / "run" / "report.html").read_bytes() == seen[-1]["report.html"]
    assert b"4 of 4" in seen[-1]["report.html"]
    with Image.open(tmp_path / "run" / "loss.png") as image:
        assert image.size == (960, 480)
    train(asked(), [], "cpu", False)  # it is done: the report is written anew, as the result is
    assert len(seen) == 3


def test_one_that_fails_costs_a_warning_and_no_bit(asked, tmp_path, monkeypatch, caplog):
    train(asked("sound"), [], "cpu", False)
    errors = [MemoryError(), ValueError("a bug"), OSError(28, "No space left on device")]

    def fail(*_):
        raise errors.pop()

    monkeypatch.setattr(Report, "make", fail)
    monkeypatch.setattr(thumbnails, "sheet_of", fail)
    train(asked("failing"), [], "cpu", False)
    assert weights(tmp_path / "sound") == weights(tmp_path / "failing")
    assert not (tmp_path / "failing" / "report.html").exists()
    assert not (tmp_path / "failing" / "dataset.jpg").exists()
    warned = [record.message for record in caplog.records if record.message.startswith(("no report", "no dataset.jpg"))]
    assert len(warned) == 3
    assert errors == []


def test_one_for_which_the_disk_has_no_room_costs_a_warning(asked, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    train(asked(train={"steps": 2}), [], "cpu", False)
    whole = (tmp_path / "run" / "report.html").read_bytes()
    from flame_train.errors import OutputError
    from flame_train.io import runfolder

    write = runfolder.write_atomically

    def refuse(place, chunks, total):
        if str(place).endswith(("report.html", "loss.png")):
            raise OutputError(f"{place}: the disk is full")
        write(place, chunks, total)

    monkeypatch.setattr(runfolder, "write_atomically", refuse)
    assert train(asked(), [], "cpu", False)["steps"] == 4
    assert (tmp_path / "run" / "report.html").read_bytes() == whole


def test_a_run_whose_folder_is_gone_ends_as_before(asked, tmp_path, monkeypatch):
    make = Report.make

    def moved(self):
        made = make(self)
        (tmp_path / "run").rename(tmp_path / "moved")
        return made

    monkeypatch.setattr(Report, "make", moved)
    with pytest.raises(FolderLost, match="was moved"):
        train(asked(), [], "cpu", False)


def test_the_sheet_has_each_image_in_its_cell_and_is_kept_for_the_same_images(asked, drawn, tmp_path):
    train(asked(train={"steps": 1}), [], "cpu", False)
    place = tmp_path / "run" / "dataset.jpg"
    files = sorted(drawn.rglob("*.png"))
    with Image.open(place) as found:
        for number, path in enumerate(files):
            with Image.open(path) as image:
                box = cell_of(number, (image.height, image.width))
                small = image.convert("RGB").resize((box[2] - box[0], box[3] - box[1]))
            difference = np.abs(np.asarray(found.crop(box), int) - np.asarray(small, int)).mean()
            assert difference < 12, path  # JPEG; of another drawing it would be some 60
    before = place.stat().st_ino
    train(asked(), [], "cpu", False)
    assert place.stat().st_ino == before
