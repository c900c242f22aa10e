"""Which image went to which bucket, told in full."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from flame_train.data.bucketed import assign_buckets
from flame_train.data.buckets import BucketRule
from flame_train.data.dataset import Dataset, DatasetError

Folder = Callable[[dict[str, tuple[int, int]]], Path]

SIZES = {"a.png": (64, 64), "b.png": (100, 64), "c/d.png": (60, 90), "e.png": (128, 128)}


def text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_report(folder: Folder) -> None:
    placed = assign_buckets(Dataset.scan(folder(SIZES)), BucketRule(64, 16))
    assert placed.buckets == ((64, 64), (80, 48), (48, 80), (64, 64))
    report = json.loads(json.dumps(placed.to_json()))
    assert [row["file"] for row in report] == list(SIZES)
    assert report[1] == {
        "file": "b.png",
        "original": "64x100",
        "bucket": "48x80",
        "resized": "51x80",
        "crop": {"left": 1, "top": 0},
        "scale": 0.8,
        "kept": 0.9412,
    }
    assert [(item.key, p.original) for item, p in placed] == list(SIZES.items())
    buckets, images = text(placed.bucket_table()), text(placed.image_table())
    assert "64x64" in buckets
    assert "0.50 to 1.00" in buckets
    for name in SIZES:
        assert name in images
    assert "left 1, right 2" in images
    assert "top 2, bottom 3" in images  # 60x90 at 80 wide is 53 high, its bucket 48


def test_too_small_images_are_listed_together_or_left_out(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"a.png": (64, 64), "s.png": (9, 9), "t.png": (12, 40)}))
    with pytest.raises(DatasetError) as caught:
        assign_buckets(dataset, BucketRule(64, 16))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["s.png", "t.png"]
    placed = assign_buckets(dataset, BucketRule(64, 16), on_bad="skip")
    assert [item.key for item in placed.dataset.items] == ["a.png"]
    assert len(placed.placements) == 1
    assert sum(notice.startswith("left out: ") for notice in placed.dataset.notices) == 2


def test_heavy_crops_are_noted(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"a.png": (64, 64), "wide.png": (31, 64)}))
    placed = assign_buckets(dataset, BucketRule(64, 16))
    assert placed.placements[1].bucket == (16, 64)
    (notice,) = placed.dataset.notices
    assert notice.startswith("1 image(s) lose over 20% to the crop, e.g. wide.png")
    assert "dataset.json" in notice  # which the run folder has, with a line for each image


def test_none_left_is_refused(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"s.png": (9, 9)}))
    with pytest.raises(DatasetError, match="too small"):
        assign_buckets(dataset, BucketRule(64, 16), on_bad="skip")
