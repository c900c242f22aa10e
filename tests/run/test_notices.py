"""Notices about plans: what is said, of which plans, and that usual ones get none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame_train.config.schema import Config
from flame_train.data.order import BatchSchedule
from flame_train.run.plan.notices import notice_batch_size, notice_copies, notice_trigger


@pytest.mark.parametrize(
    ("keys", "captions", "said"),
    [
        ({"output": {"trigger": "zzqq"}}, ("a cat", "a dog"), 'output.trigger: 0 of 2 images have "zzqq" in a caption'),
        ({"output": {"trigger": "ZZqq"}}, ("a zzqq cat", "a dog"), ""),
        ({}, ("a [trigger] cat", "a dog"), "captions.trigger: 1 image has a caption with [trigger], which only"),
        ({}, ("a [name] cat", "[trigger]"), "captions.trigger: 2 images have a caption with [name], which only"),
        ({}, ("a cat",), ""),
    ],
)
def test_a_trigger_that_no_caption_holds(
    caplog: pytest.LogCaptureFixture, keys: dict[str, dict[str, str]], captions: tuple[str, ...], said: str
) -> None:
    samples = SimpleNamespace(rows=[SimpleNamespace(texts=(caption,)) for caption in captions])
    notice_trigger(Config.model_validate(keys), samples)
    assert caplog.text.count("\n") == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("images", "size", "said"),
    [
        (8, 500, "data.batch_size: 500 is more than the 8 samples of the largest bucket, so each batch repeats images"),
        (1, 2, "data.batch_size: 2 is more than the 1 sample of the largest bucket"),
        (8, 8, ""),
        (9, 8, ""),
    ],
)
def test_a_batch_beyond_the_set(caplog: pytest.LogCaptureFixture, images: int, size: int, said: str) -> None:
    notice_batch_size(BatchSchedule([(64, 64)] * images + [(32, 96)], 1, size, 0))
    assert caplog.text.count("\n") == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(("images", "told"), [(31, False), (10, True)])
def test_copies_are_told_where_they_are_many(caplog: pytest.LogCaptureFixture, images: int, told: bool) -> None:
    with caplog.at_level("INFO"):
        notice_copies(BatchSchedule([(64, 64)] * images, 1, 8, 0), [8])
    assert ("6 of an epoch's 16 samples repeat others" in caplog.text) == told
