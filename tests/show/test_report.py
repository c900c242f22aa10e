"""`report.html`: one file that loads nothing, says no folder of this machine, and shows every text as it is."""

from __future__ import annotations

import io
import math
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from flame_train.show.curves import Curve
from flame_train.show.report import Report, loss_png

from .conftest import PLANTED, PROMPTS


class Parsed(HTMLParser):
    """The elements of a page as (tag, attributes), and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def test_it_holds_all_that_it_shows_and_little_of_it(made):
    text = made().report().read_text()
    page = Parsed(text)
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert all(link.startswith(("data:image/jpeg;base64,", "#")) for link in links)
    assert len([link for link in links if link.startswith("data:")]) == 5 * 3
    assert len(page.tags("script")) == 1
    assert len(page.tags("svg")) >= 9
    assert len(text) < 400_000
    assert "http://" not in text
    assert "https://" not in text


def test_it_says_no_folder_of_this_machine(made, tmp_path):
    text = made().report().read_text()
    assert "/secret" not in text
    assert str(tmp_path) not in text
    assert "photos" in text


def test_a_planted_text_is_shown_as_it_is(made):
    page = Parsed(made(f"a <b>run{PLANTED[8:17]}").report().read_text())
    assert page.texts.count(f"a cat {PLANTED}") == 2  # the prompt above its column, and the caption
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert len(page.tags("script")) == 1
    assert not page.tags("b")


def test_it_has_every_prompt_the_settings_and_the_images_of_highest_loss_first(made):
    page = Parsed(made(lr=3e-4).report().read_text())
    assert all(prompt in page.texts for prompt in PROMPTS)
    assert "optimizer.lr" in page.texts
    assert "0.0003" in page.texts
    assert page.texts.index("a.png") < page.texts.index("005.png") < page.texts.index("000.png")
    assert "112 more are in dataset.json and images.json of the run folder." in page.texts


def test_a_copied_folder_gives_the_same_report(made, tmp_path):
    run = made()
    shutil.copytree(run.folder, tmp_path / "elsewhere" / "run")
    shutil.rmtree(run.folder / "checkpoints")
    (run.folder / "lora.safetensors").unlink()
    here, there = (Report(path).make() for path in (run.folder, tmp_path / "elsewhere" / "run"))
    assert here["loss.png"] == there["loss.png"]
    assert here["report.html"].partition(b'id="files"')[0] == there["report.html"].partition(b'id="files"')[0]


def test_a_report_that_is_made_again_is_the_one_that_a_new_reader_makes(made):
    run = made()
    report = Report(run.folder)
    report.make()
    run.append(41)
    run.draw(41)
    assert report.make() == Report(run.folder).make()


def test_many_grids_are_thinned_to_a_file_that_can_be_sent(made):
    run = made()
    for step in range(50, 1000, 10):
        run.draw(step)
    page = Parsed(run.report().read_text())
    steps = sorted(int(row["data-step"]) for row in page.tags("tr") if "data-step" in row)
    assert len(steps) == 16
    assert (steps[0], steps[-1]) == (0, 990)
    assert "16 of 100 grids are shown here; the run folder has all." in page.texts


def test_the_loss_image_is_lower_where_the_loss_is_lower():
    """The smoothed line's mean height in the image falls with the loss: an independent look at the pixels."""
    falling = Curve()
    for step in range(1, 401):
        falling.add(step, 1.0 - step / 500)
    with Image.open(io.BytesIO(loss_png("run", falling, Curve()))) as image:
        assert image.size == (960, 480)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    line = (abs(pixels - np.array([0x0B, 0x62, 0xA8])).sum(axis=2) < 60)[40:]
    rows = [np.nonzero(line[:, x])[0].mean() for x in range(120, 900, 60)]
    assert all(after > before for before, after in pairwise(rows))


def test_a_validation_far_above_a_weighted_loss_is_drawn_whole():
    """Its first point is its highest, and its line falls; the axis, here a logarithmic one, does not cut it."""
    tiny, held_out = Curve(), Curve()
    for step in range(1, 201):
        tiny.add(step, 2e-4)
    for step, loss in ((20, 0.06), (40, 0.03), (200, 0.019)):
        held_out.add(step, loss)
    with Image.open(io.BytesIO(loss_png("run", tiny, held_out, weighted=True))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((abs(pixels - np.array([0xC8, 0x50, 0x1E])).sum(axis=2) < 60)[60:])
    highest = [rows[columns == x].min() for x in sorted(set(columns))]
    assert highest[0] - min(highest) < 8
    assert highest[-1] - highest[0] == pytest.approx(380 * math.log(0.06 / 0.019) / math.log(0.1 / 2e-4), abs=4)
