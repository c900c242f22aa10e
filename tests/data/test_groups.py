"""Groups of images by name: they stay together in every batch, and what makes no group is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import flame_train.diffusion.objective_kind as objectives
from flame_train.config.load import from_options
from flame_train.data.clip_files import times, webp
from flame_train.data.order import BatchSchedule
from flame_train.diffusion.objective_kind import Denoising
from flame_train.errors import ConfigError, DataError
from flame_train.run.plan.read_dataset import read_dataset, split_held_out
from flame_train.training.session import StopRequest

SIZES = {"a": (96, 96), "b": (96, 96), "c": (128, 64), "d": (96, 96)}


class Pairs(Denoising):
    name = "denoising"
    group = ("win", "lose")


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pairs, and an objective that asks for them."""
    monkeypatch.setitem(objectives.OBJECTIVES._entries, "denoising", Pairs)
    for number, (name, size) in enumerate(SIZES.items()):
        for second, ending in enumerate(Pairs.group):
            pixels = np.full((size[1], size[0], 3), 40 * number + second, np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{name}.{ending}.png")
        (tmp_path / f"{name}.txt").write_text(f"caption {name}")
    return tmp_path


def samples(folder: Path, batch_size: int = 4, more: Mapping[str, Any] = MappingProxyType({}), **validation: float):
    data = {"path": str(folder), "resolution": 96, "bucket_step": 32, "batch_size": batch_size, **more}
    config = from_options(data=data, validation=validation, output={"dir": str(folder / "run")})
    return split_held_out(config, read_dataset(config, StopRequest()), 0)[0]


def write_pair_of_clips(folder: Path, lengths: tuple[int, int]) -> None:
    for ending, frames in zip(Pairs.group, lengths, strict=True):
        pixels = np.stack([np.full((96, 96, 3), 10 * number, np.uint8) for number in range(frames)])
        (folder / f"a.{ending}.webp").write_bytes(webp(pixels, times(frames, 24)))
    (folder / "a.txt").write_text("caption a")


def test_parts_of_clips_are_paired_at_their_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two clips the first has three parts and the other two: the third part has no other half."""
    monkeypatch.setitem(objectives.OBJECTIVES._entries, "denoising", Pairs)
    write_pair_of_clips(tmp_path, (15, 10))
    clips = {"frames": 5, "frame_extraction": "chunk", "resolutions": [96, 64], "bucket_step": 32}
    with pytest.raises(DataError) as raised:
        samples(tmp_path, more=clips)
    lines = str(raised.value).splitlines()[1:]
    assert lines == ["  a: expected an image .lose too, got none that can be used"] * 2
    (tmp_path / "a.win.webp").write_bytes((tmp_path / "a.lose.webp").read_bytes())
    found = samples(tmp_path, more=clips).rows
    halves = [(row.placement.bucket, row.placement.span) for row in found]
    assert halves[::2] == halves[1::2]
    assert len(set(halves)) == 4


def test_clips_of_other_lengths_are_told_with_their_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES._entries, "denoising", Pairs)
    write_pair_of_clips(tmp_path, (9, 5))
    with pytest.raises(DataError, match="got buckets of 96x96 of 9 frames and 96x96 of 5 frames"):
        samples(tmp_path, more={"frames": [5, 9]})


def test_a_batch_has_whole_groups_in_their_order(pairs: Path) -> None:
    found = samples(pairs)
    assert [row.item.key for row in found.rows][:2] == ["a.win.png", "a.lose.png"]
    assert [row.texts for row in found.rows][:2] == [("caption a",)] * 2
    assert not found.notices
    order = found.order(3)
    for batch in (batch for epoch in range(3) for batch in order.epoch(epoch)):
        names = [found.rows[i].item.key for i in batch.indices]
        assert len(names) == 4
        assert [name.split(".")[1] for name in names] == ["win", "lose"] * 2
        assert [name.split(".")[0] for name in names[::2]] == [name.split(".")[0] for name in names[1::2]]
        assert batch.draws[::2] == batch.draws[1::2]
    assert (order.batches_per_epoch, order.samples_per_epoch, order.filled_per_epoch) == (3, 12, 4)
    assert (order.largest_batch, order.fullest) == (4, (4, 6))


def test_groups_come_in_the_order_of_single_items() -> None:
    """The same buckets, repeats and seed with one item for each group."""
    buckets, repeats = [(64, 64), (64, 96), (64, 64)], [1, 2, 3]
    single = BatchSchedule(buckets, repeats, 2, 5)
    both = BatchSchedule([b for b in buckets for _ in "ab"], [r for r in repeats for _ in "ab"], 4, 5, group=2)
    for one, two in zip(single.epoch(1), both.epoch(1), strict=True):
        assert two.indices == tuple(i for index in one.indices for i in (2 * index, 2 * index + 1))
        assert two.filled == 2 * one.filled


def test_what_makes_no_group_is_named(pairs: Path) -> None:
    (pairs / "b.lose.png").unlink()
    (pairs / "d.lose.png").unlink()
    Image.new("RGB", (128, 64)).save(pairs / "d.lose.png")
    Image.new("RGB", (96, 96), 7).save(pairs / "e.png")
    (pairs / "e.txt").write_text("e")
    with pytest.raises(DataError) as told:
        samples(pairs)
    assert "e.png: expected a name that ends with .win or .lose" in str(told.value)
    assert "b: expected an image .lose too" in str(told.value)
    assert "d: expected images of one size, got buckets of 96x96 and 128x64" in str(told.value)


def test_batches_and_shares_that_part_groups_are_refused(pairs: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size: expected a multiple of 2, of win and lose, got 3"):
        samples(pairs, 3)
    with pytest.raises(ConfigError, match=r"validation\.fraction: expected 0 with groups"):
        samples(pairs, 4, fraction=0.5)
