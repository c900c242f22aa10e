"""`flame-train dataset` names what looks wrong, and draws each bucket."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image, ImageFilter

from flame_train.config.render import resolved
from flame_train.data.grid import contact_sheet, fingerprint, sharpness
from flame_train.errors import OutputError
from flame_train.run.commands.dataset_report import report

NOISE = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)


@pytest.fixture
def told(small_config, drawn, tmp_path):
    """The report on the drawings and five more images, and its folder."""
    for name, image in {
        "noise": Image.fromarray(NOISE),
        "blurred": Image.fromarray(NOISE).filter(ImageFilter.GaussianBlur(8)),
        "tiny": Image.fromarray(NOISE).crop((0, 0, 40, 40)),
    }.items():
        image.save(drawn / f"{name}.png")
    shutil.copy(drawn / "noise.png", drawn / "copy.png")
    os.link(drawn / "noise.png", drawn / "link.png")
    Image.fromarray(NOISE).save(drawn / "again.webp", lossless=True)
    for name in ("noise", "blurred", "tiny", "copy", "link", "again"):
        (drawn / f"{name}.txt").write_text(name)
    config = tmp_path / "x.toml"
    config.write_text(resolved(small_config()))
    return report(str(config), [], tmp_path / "report", False), tmp_path / "report"


def test_what_looks_wrong_is_named(told):
    found, folder = told
    assert found["links_to_the_same_file"] == [["link.png", "noise.png"]]
    assert found["duplicates"] == [["copy.png", "link.png"]]
    assert ["again.webp", "copy.png"] in found["alike"]
    assert found["tiny"] == ["tiny.png"]
    assert "blurred.png" in [row["file"] for row in found["blurred"]]
    assert "noise.png" not in [row["file"] for row in found["blurred"]]
    assert json.loads((folder / "report.json").read_text())["images"] == found["images"] == 18


def test_each_bucket_has_a_contact_sheet(told):
    found, folder = told
    sheets = {path.name for path in folder.glob("bucket-*.png")}
    assert sheets == {f"bucket-{row['bucket']}.png" for row in found["buckets"]}
    for path in folder.glob("bucket-*.png"):
        with Image.open(path) as sheet:
            assert np.array(sheet).std() > 0


def test_a_folder_in_use_is_not_overwritten(told, tmp_path):
    with pytest.raises(OutputError, match="is not empty"):
        report(str(tmp_path / "x.toml"), [], told[1], False)
    report(str(tmp_path / "x.toml"), [], told[1], True)


def test_sharpness_falls_with_blur_and_not_with_size():
    image = Image.fromarray(NOISE).resize((512, 512), Image.Resampling.BICUBIC)
    blurs = [sharpness(np.array(image.filter(ImageFilter.GaussianBlur(radius)))) for radius in (0, 1, 3, 8)]
    assert blurs == sorted(blurs, reverse=True)
    large = np.array(image.resize((1024, 1024), Image.Resampling.BICUBIC))
    assert sharpness(large) == pytest.approx(blurs[0], rel=0.3)


def test_a_fingerprint_survives_another_size_and_not_another_image():
    image = Image.fromarray(NOISE).resize((9, 8)).resize((288, 256), Image.Resampling.NEAREST)
    assert fingerprint(np.array(image)) == fingerprint(np.array(image.resize((576, 512), Image.Resampling.NEAREST)))
    assert fingerprint(np.array(image)) != fingerprint(NOISE)


def test_a_sheet_holds_every_thumbnail():
    cells = [np.full((3, 5, 3), number, np.uint8) for number in range(23)]
    sheet = contact_sheet(cells)
    assert {number for number in range(23) if (sheet == number).all(axis=2).sum() == 15} == set(range(23))
