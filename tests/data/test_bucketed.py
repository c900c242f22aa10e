"""Which image went to which bucket, told in full."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.data.bucketed import assign_buckets, bucket_rows
from flame_train.data.buckets import BucketRule
from flame_train.data.dataset import Dataset, DatasetError

Folder = Callable[[dict[str, tuple[int, int]]], Path]

SIZES = {"a.png": (64, 64), "b.png": (100, 64), "c/d.png": (60, 90), "e.png": (128, 128)}


def test_report(folder: Folder) -> None:
    placed = assign_buckets(Dataset.scan(folder(SIZES)), BucketRule(64, 16))
    assert [p.bucket for p in placed.placements] == [(64, 64), (80, 48), (48, 80), (64, 64)]
    assert json.loads(json.dumps(placed.placements[1].to_json())) == {
        "original": "64x100",
        "bucket": "48x80",
        "resized": "51x80",
        "crop": {"left": 1, "top": 0},
        "scale": 0.8,
        "kept": 0.9412,
    }
    assert [(item.key, p.original) for item, p in placed] == list(SIZES.items())
    square = next(row for row in bucket_rows(placed.placements) if row["bucket"] == "64x64")
    assert square == {"bucket": "64x64", "images": 2, "scale_least": 0.5, "scale_most": 1.0, "cropped_most": 0.0}


def test_too_small_images_are_listed_together_or_left_out(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"a.png": (64, 64), "s.png": (9, 9), "t.png": (12, 40)}))
    with pytest.raises(DatasetError) as caught:
        assign_buckets(dataset, BucketRule(64, 16))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["s.png", "t.png"]
    many = {f"{number}.png": (9, 9 + number % 5) for number in range(160)}
    with pytest.raises(DatasetError) as caught:
        assign_buckets(Dataset.scan(folder({"a.png": (64, 64)} | many)), BucketRule(64, 16))
    first, cause = str(caught.value).splitlines()
    assert first.endswith("162 problems in the dataset:")
    assert re.fullmatch(r"  162 images, such as 0\.png, .*\.png, are below \d+ px at data\.resolution 64, .*", cause)
    placed = assign_buckets(dataset, BucketRule(64, 16), on_bad="skip")
    assert [item.key for item in placed.dataset.items] == ["a.png"]
    assert len(placed.placements) == 1
    assert sum(notice.startswith("left out: ") for notice in placed.dataset.notices) == 2


def test_heavy_crops_are_noted(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"a.png": (64, 64), "wide.png": (31, 64)}))
    placed = assign_buckets(dataset, BucketRule(64, 16))
    assert placed.placements[1].bucket == (16, 64)
    (notice,) = placed.dataset.notices
    assert notice.startswith("1 image loses over 20% to the crop, e.g. wide.png")
    assert "`flame-train dataset` shows them all" in notice


def test_none_left_is_refused(folder: Folder) -> None:
    dataset = Dataset.scan(folder({"s.png": (9, 9)}))
    with pytest.raises(DatasetError, match="is below"):
        assign_buckets(dataset, BucketRule(64, 16), on_bad="skip")
