"""Reading a run from its folder: curves, grids, the dataset and the config; and folders that are not whole."""

from __future__ import annotations

import io
import json
import os
import random
from array import array
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from flame_train.data.grid import grid, places
from flame_train.data.images import load_image
from flame_train.disk.open_folder import OpenFolder
from flame_train.io.runfolder import RunFolder
from flame_train.show.charts import Chart, Drawing, Line, charts_of
from flame_train.show.curves import Curve, LogCurves
from flame_train.show.run_reader import RunReader, Setting, without_folders
from flame_train.show.sections import status
from flame_train.show.svg import axis, html, log_axis, svg
from flame_train.show.trained_images import (
    MOST,
    cell_of,
    cells_in,
    images_of,
    sheet_of,
    sheet_of_some,
    with_losses,
    with_thumbnail,
)
from flame_train.training.log import KEPT, Meter

from .conftest import record


def curve(values):
    return Curve(array("d", range(1, len(values) + 1)), array("d", values))


# ---- curves ------------------------------------------------------------------------------------------------


def test_smoothing_is_that_of_the_console():
    values = list(np.random.default_rng(1).normal(size=60))
    meter, expected = Meter(), []
    for value in values:
        meter.add(value, 1.0)
        expected.append(meter.loss)
    assert list(curve(values).smoothed(KEPT).values) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
def test_a_thinned_curve_keeps_its_extremes_and_its_ends_and_is_short(values, most):
    whole, thin = curve(values), curve(values).thinned(most)
    assert len(thin) <= max(most + 2, 4)
    assert {min(values), max(values)} <= set(thin.values)
    assert thin.steps[-1] == whole.steps[-1]
    assert list(thin.steps) == sorted(set(thin.steps))
    assert all(whole.values[int(step) - 1] == value for step, value in zip(thin.steps, thin.values, strict=True))


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 60))
def test_points_evenly_spaced_have_the_last_among_them(values, most):
    whole, some = curve(values), curve(values).every(most)
    assert len(some) <= most + 1
    assert list(some.steps[-1:]) == list(whole.steps[-1:])
    assert all(whole.values[int(step) - 1] == value for step, value in zip(some.steps, some.values, strict=True))


def test_a_log_that_grows_is_read_line_by_line_and_one_that_was_cut_from_its_beginning(tmp_path):
    log, lines = tmp_path / "log.jsonl", [json.dumps({"step": i, "loss": i / 7}) + "\n" for i in range(1, 40)]
    curves, written = LogCurves(), ""
    for part in ("".join(lines[:9]), lines[9][:5], lines[9][5:], "".join(lines[10:])):
        written += part
        log.write_text(written)
        with OpenFolder.open(tmp_path) as folder:
            curves.read(folder)
        assert list(curves.curves["loss"].steps) == list(range(1, written.count("\n") + 1))
    other = [json.dumps({"step": i, "loss": i / 9}) + "\n" for i in range(1, 60)]
    log.write_text("".join(lines[:20] + other[20:]))
    with OpenFolder.open(tmp_path) as folder:
        curves.read(folder)
    assert list(curves.curves["loss"].values) == [i / 7 for i in range(1, 21)] + [i / 9 for i in range(21, 60)]
    log.write_text("".join(lines[:3]))
    with OpenFolder.open(tmp_path) as folder:
        curves.read(folder)
    assert list(curves.curves["loss"].steps) == [1, 2, 3]


def test_a_line_that_is_no_record_ends_the_curve(tmp_path):
    for bad in ("{}\n", "[1]\n", '{"step": "2"}\n', "\0" * 70000):
        (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": null, "lr": true, "x": 1e400}\n' + bad)
        curves = LogCurves()
        with OpenFolder.open(tmp_path) as folder:
            curves.read(folder)
        assert (curves.last["step"], set(curves.curves)) == (1, {"step"})


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.booleans())
@example([5e-324], False)
@example([5e-324], True)
@example([0.0, 5e-324], False)
def test_an_axis_holds_all_values_between_round_ticks(values, zero):
    found = axis(values, 5, zero=zero)
    slack = 1e-6 * (found.high - found.low)
    assert found.low - slack <= min(values)
    assert max(values) <= found.high + slack
    assert 2 <= len(found.ticks) <= 13
    assert list(found.ticks) == sorted(set(found.ticks))
    assert all(0.0 <= found.share(value) <= 1.0 for value in values)


@given(st.lists(st.floats(5e-324, 1.7e308), min_size=1, max_size=20))
@example([1.7e308])
@example([5e-324])
@example([0.1, 0.11])
def test_a_logarithmic_axis_holds_all_values_between_its_ticks(values):
    found = log_axis(values)
    assert 0.0 < found.low < found.high
    assert all(0.0 <= found.share(value) <= 1.0 for value in values)
    assert all(
        found.share(value, 1e9) == pytest.approx(found.share(value), abs=1e-9) for value in values if value > 1e-300
    )
    assert list(found.ticks) == sorted(set(found.ticks))
    assert len(found.ticks) <= 16


def test_lines_that_lie_far_apart_have_a_logarithmic_axis():
    """Of a line at 1 and one at 0.002 neither is flat, if a warm-up begins at 0 too."""
    steps = (1.0, 2.0, 3.0)
    far, near = Line("far", steps, (1.0, 0.9, 0.7)), Line("near", steps, (0.002, 0.0018, 0.0013))
    assert Chart("loss", "Loss", (far, near)).apart
    assert not Chart("loss", "Loss", (far, replace(near, y=(0.5, 0.4, 0.3)))).apart
    assert Chart("lr", "lr", (far, replace(near, y=(0.0, 0.0018, 0.0013)))).apart
    assert not Chart("lr", "lr", (far, replace(near, y=(-0.1, 0.0018, 0.0013)))).apart
    assert 'data-log=""' in html(svg(Chart("loss", "Loss", (far, near))))
    assert "data-log" not in html(svg(Chart("loss", "Loss", (far, near)), "zero"))


# ---- grids and images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 10, 17])
def test_places_are_where_a_grid_puts_its_images(count):
    images = [np.random.default_rng(i).integers(0, 255, (24, 40, 3), np.uint8) for i in range(count)]
    sheet = grid(images)
    found = places(sheet.shape[:2], count)
    for image, (top, left, height, width) in zip(images, found, strict=True):
        assert np.array_equal(sheet[top : top + height, left : left + width], image)


@pytest.mark.parametrize("sheet", [(52, 85), (53, 84), (0, 0), (4, 4)])
def test_a_sheet_of_another_size_has_no_places_for_the_images(sheet):
    assert places((52, 84), 4)
    assert places(sheet, 4) == ()


@pytest.mark.parametrize("count", [0, 1, MOST, MOST + 1, 1000, 20000])
def test_thumbnails_are_spread_over_the_dataset_and_lie_in_cells_of_their_own(count):
    chosen = with_thumbnail(count)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == min(count, MOST)
    assert all(0 <= number < count for number in chosen)
    boxes = [cell_of(cell, random.Random(cell).choice([(10, 2000), (3000, 20), (7, 7)])) for cell in range(len(chosen))]
    corners = {(left // 96, top // 96) for left, top, _, _ in boxes}
    assert len(corners) == len(boxes)
    assert all(
        left // 96 == (right - 1) // 96 and top // 96 == (bottom - 1) // 96 for left, top, right, bottom in boxes
    )


def test_an_image_is_joined_with_its_running_loss_also_in_sets():
    sizes = {"original": "8x4", "resized": "8x4", "bucket": "4x4", "crop": {"left": 2, "top": 0}}
    rows = [{"set": "one", "file": "a.png", **sizes}, {"set": "two", "file": "a.png", **sizes}]
    losses = {"images": [{"file": "two/a.png", "relative_loss": 2.5, "seen": 4}]}
    found = with_losses(images_of(json.dumps(rows).encode(), 0), json.dumps(losses).encode())
    assert [(image.name, image.loss, image.seen) for image in found] == [
        ("two/a.png", 2.5, 4),
        ("one/a.png", None, None),
    ]
    assert found[0].cropped == (0.25, 0.0, 0.5, 1.0)
    assert found[0].thumbnail is None


def test_an_image_of_the_only_trained_set_is_joined_by_its_file():
    """A run that holds a whole set out names the trained images without their set."""
    sizes = {"original": "8x4", "resized": "8x4", "bucket": "4x4", "crop": {"left": 2, "top": 0}}
    rows = [{"set": "one", "file": "a.png", **sizes}, {"set": "two", "file": "a.png", "validation": True, **sizes}]
    losses = {"images": [{"file": "a.png", "relative_loss": 2.5, "seen": 4}]}
    found = with_losses(images_of(json.dumps(rows).encode(), 0), json.dumps(losses).encode())
    assert [(image.name, image.loss) for image in found] == [("one/a.png", 2.5), ("two/a.png", None)]


@pytest.mark.parametrize("most", [120, MOST])
def test_a_thumbnail_is_that_of_its_image_in_sheets_of_every_size(most):
    """Each cell's colour says which image it is of; earlier versions wrote sheets of 120."""
    sizes = {"original": "96x96", "resized": "96x96", "bucket": "96x96", "crop": {"left": 0, "top": 0}}
    rows = [{"file": f"{i}.png", **sizes} for i in range(3 * MOST)]
    pixels = np.zeros((most // 12 * 96, 12 * 96, 3), np.uint8)
    for cell, number in enumerate(with_thumbnail(len(rows), most)):
        left, top, right, bottom = cell_of(cell, (96, 96))
        pixels[top:bottom, left:right] = (number % 16 * 15, number // 16 % 16 * 15, number // 256 * 15)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    images = images_of(json.dumps(rows).encode(), cells_in(buffer.getvalue()))
    assert sum(image.cell is not None for image in images) == most
    some = [image for image in images if image.cell is not None][5:most:7]
    made, again = sheet_of_some(buffer.getvalue(), [*some, images[1]])
    for raw, shown in ((buffer.getvalue(), some), (made, again[:-1])):
        with Image.open(io.BytesIO(raw)) as sheet:
            for image in shown:
                left, top, _, _ = image.thumbnail
                number = int(image.name.removesuffix(".png"))
                wanted = (number % 16 * 15, number // 16 % 16 * 15, number // 256 * 15)
                assert np.abs(np.subtract(sheet.getpixel((left + 48, top + 48)), wanted)).max() < 7


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[1, null, {}]",
        b'[{"original": [0, 1]}]',
        b'[{"original": "9x0", "crop": 3}]',
        b"[" * 100000,
    ],
)
def test_a_dataset_that_makes_no_sense_has_no_images(raw):
    assert images_of(raw, 12) == ()
    assert with_losses((), raw) == ()


# ---- the whole folder --------------------------------------------------------------------------------------


def test_a_run_is_read_whole(made):
    view = RunReader(made().folder).read()
    assert (view.name, view.step, view.steps, view.status["state"]) == ("run", 40, 80, "done")
    assert [grid.step for grid in view.grids] == [0, 10, 20, 30, 40]
    assert {len(grid.boxes) for grid in view.grids} == {3}
    assert len(view.images) == 212
    assert (view.images[0].name, view.images[0].loss, view.images[0].mask) == ("a.png", 3.25, "a.mask.png")
    assert [image.name for image in view.images if image.held_out] == ["b.png"]
    assert "checkpoints/step-000040" in {kept.name for kept in view.files}
    names = [chart.name for chart in charts_of(view, 100, Drawing())]
    assert names == [
        *("loss", "validation", "timesteps", "validation-timesteps", "bands", "lr", "grad_norm", "images_per_s"),
        "optimizer-d",
    ]


def test_what_was_read_stays_as_it_was_when_the_run_goes_on(made):
    run = made()
    reader = RunReader(run.folder)
    before = reader.read()
    run.append(41)
    after = reader.read()
    assert (len(before.curves["loss"]), before.step) == (40, 40)
    assert (len(after.curves["loss"]), after.step) == (41, 41)
    assert before.images is after.images


def test_a_run_goes_on_only_while_its_lock_is_held(made):
    run = made()
    config = (run.folder / "config.toml").read_text()
    with RunFolder(run.folder, config, lambda old, found: None) as folder:
        folder.resume()
        folder.log(record(41), {"steps": 80, "steps_per_s": 2.0})
        view = RunReader(run.folder).read()
        assert (view.status["state"], view.step, view.seconds_left) == ("running", 41, 19.5)
        assert "0:00:20 left" in html(status(view, live=True))
        raw = (run.folder / "status.json").read_bytes()
    (run.folder / "status.json").write_bytes(raw)  # as a run that was killed leaves it
    view = RunReader(run.folder).read()
    assert (view.status["state"], view.seconds_left) == ("interrupted", None)


def test_what_a_mask_leaves_out_is_dark_in_the_thumbnail(tmp_path):
    Image.new("RGB", (200, 100), "white").save(tmp_path / "a.png")
    values = np.zeros((100, 200), np.uint8)
    values[:, :100] = 255
    mask = SimpleNamespace(read=lambda: values)

    def sample(name, mask):
        view = SimpleNamespace(placement=SimpleNamespace(span=None))
        seen = SimpleNamespace(view=view, picture=lambda reader: load_image(tmp_path / name)[0])
        return SimpleNamespace(item=SimpleNamespace(size=(100, 200), mask=mask), seen=lambda view: seen)

    samples = [sample("a.png", mask), sample("gone.png", None), sample("a.png", None)]
    with Image.open(io.BytesIO(sheet_of(samples, ""))) as sheet:
        grey = np.asarray(sheet.convert("L"), float)
    counts, out, gone, whole = (grey[8:40, x : x + 30].mean() for x in (8, 58, 108, 200))
    assert counts > 240
    assert whole > 240
    assert 60 < out < 95  # 0.3 of white
    assert 120 < gone < 136


def test_a_setting_differs_where_the_config_says_another_value(made):
    view = RunReader(made(lr=3e-4).folder).read()
    differing = {setting.path for setting in view.settings if setting.differs}
    assert differing == {
        *("model.checkpoint", "data.path", "optimizer.lr", "train.steps", "sample.prompts", "sample.every"),
        "output.dir",
    }


def test_a_file_of_a_setting_goes_by_its_last_name():
    setting = Setting("data.path", '"/secret/home/photos"', '""', "")
    assert without_folders(setting).value == '"photos"'
    sets = Setting("data.sets", '[{path = "/secret/home/photos", repeats = 2}]', "[]", "")
    assert "secret" not in without_folders(sets).value
    prompts = Setting("sample.prompts", '["a cat", {text = "a dog", control = ["/secret/home/a.png"]}]', "[]", "")
    assert without_folders(prompts).value == '["a cat", {control = ["a.png"], text = "a dog"}]'


@pytest.mark.parametrize(
    "name", ["log.jsonl", "config.toml", "dataset.json", "images.json", "dataset.jpg", "status.json", "samples"]
)
def test_a_part_that_is_damaged_leaves_the_others(made, tmp_path, name):
    run = made()
    place, aside = run.folder / name, tmp_path / "aside"
    place.rename(aside)
    damages = {
        "gone": lambda: None,
        "link": lambda: os.symlink(aside, place),
        "empty": lambda: place.write_bytes(b""),
        "noise": lambda: place.write_bytes(random.Random(1).randbytes(5000)),
        "folder": place.mkdir,
    }
    for damage, do in damages.items():
        place.unlink(missing_ok=True)
        do()
        view = RunReader(run.folder).read()
        assert (len(view.images) == 0) == (name == "dataset.json"), damage
        assert (len(view.settings) == 0) == (name == "config.toml"), damage
        assert (len(view.grids) == 0) == (name == "samples"), damage
        assert ("loss" in view.curves) == (name != "log.jsonl"), damage
    run.report()


def test_a_grid_that_is_cut_short_or_of_other_prompts(made):
    run = made()
    place = run.folder / "samples" / "step-000020.png"
    place.write_bytes(place.read_bytes()[:100])
    (run.folder / "samples" / "step-000030.png").write_bytes(b"no image")
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace('"a dog", ', "").replace('"a house on a hill"', '"a house"'))
    view = RunReader(run.folder).read()
    assert [grid.step for grid in view.grids] == [0, 10, 20, 40]
    run.report()
