"""Batches come in the order that was promised, from any place on, whoever waits for them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flame_train.data.order import BatchSchedule, Choices, caption_dropped
from flame_train.errors import DataError
from flame_train.training.batch import Loader

BUCKETS = [(64, 64), (64, 96), (64, 64), (64, 96), (64, 64)]
NAMES = [f"{i}.png" for i in range(len(BUCKETS))]


def example(index, drop_caption, dropped=frozenset()):
    return {"mean": np.full((2, 2, 4), index, np.float32), "dropped": np.array(drop_caption)}


def loader(first=0, accumulation=1, dropout=0.0, make=example, batch_size=2, encoders=None):
    order = BatchSchedule(BUCKETS, 1, batch_size, 5)
    return Loader(order, seen(make, dropout, encoders), NAMES, first=first, accumulation=accumulation)


def seen(make, dropout=0.0, encoders=None):
    """`make` with what the choices of a run give it."""
    choices = Choices(5, [dropout] * len(BUCKETS), encoders or {}, [1] * len(BUCKETS), [1] * len(BUCKETS))

    def made(epoch, index, draw):
        choice = choices.of(epoch, index, draw)
        return make(index, choice.drop_caption, choice.dropped)

    return made


def take(count, **settings):
    with loader(**settings) as source:
        return [source.take() for _ in range(count)]


def test_batches_follow_the_order():
    order = BatchSchedule(BUCKETS, 1, 2, 5)
    for micro, batch in enumerate(take(12)):
        wanted = order.batch_at(micro).indices
        assert batch.arrays["mean"][:, 0, 0, 0].tolist() == list(wanted)
        assert batch.files == tuple(NAMES[i] for i in wanted)


def test_an_epoch_has_every_item():
    per_epoch = BatchSchedule(BUCKETS, 1, 1, 5).batches_per_epoch
    seen = [name for batch in take(per_epoch, batch_size=1) for name in batch.files]
    assert sorted(seen) == NAMES


@pytest.mark.parametrize("first", [1, 3, 7, 30])
def test_starting_anywhere_gives_what_would_have_come_there(first):
    whole = take(first + 4, dropout=0.5)
    for a, b in zip(whole[first:], take(4, first=first, dropout=0.5), strict=True):
        assert (a.step, a.files) == (b.step, b.files)
        assert a.arrays.keys() == b.arrays.keys()
        for name in a.arrays:
            np.testing.assert_array_equal(a.arrays[name], b.arrays[name])


def test_samples_of_an_update_have_numbers_of_their_own():
    batches = take(9, accumulation=3)
    assert [b.step for b in batches] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for update in range(3):
        numbers = np.concatenate([b.samples for b in batches[3 * update : 3 * update + 3]])
        assert numbers.tolist() == list(range(6))


def test_captions_are_dropped_as_the_seed_says():
    order = BatchSchedule(BUCKETS, 1, 2, 5)
    for micro, batch in enumerate(take(40, dropout=0.5)):
        plan = order.batch_at(micro)
        drawn = zip(plan.indices, plan.draws, strict=True)
        wanted = [caption_dropped(0.5, 5, order.epoch_of(micro), i, draw) for i, draw in drawn]
        assert batch.arrays["dropped"].tolist() == wanted


def test_one_batch_is_made_ahead_and_no_more():
    made, ready = [], threading.Semaphore(0)

    def slow(index, drop_caption, dropped):
        made.append(index)
        ready.release()
        return example(index, drop_caption, dropped)

    with loader(make=slow, batch_size=1) as source:
        source.take()
        assert ready.acquire(timeout=10)
        assert ready.acquire(timeout=10)
        source.take()
    assert len(made) <= 3


def test_what_goes_wrong_on_the_thread_is_raised_where_the_batch_is_taken():
    def broken(index, drop_caption, dropped):
        raise DataError("the image is gone")

    with loader(make=broken) as source, pytest.raises(DataError, match="the image is gone"):
        source.take()


def test_leaving_ends_the_thread():
    with loader() as source:
        source.take()
    assert not [t for t in threading.enumerate() if t.name.startswith("flame-train-loader")]


def test_batches_are_sent_on_the_loaders_thread_before_they_are_taken():
    sent = []

    def send(batch):
        sent.append((threading.current_thread(), batch.files))
        return batch

    order = BatchSchedule(BUCKETS, 1, 2, 5)
    with Loader(order, seen(example), NAMES, first=0, accumulation=1, send=send) as source:
        taken = [source.take().files for _ in range(4)]
    assert [files for _, files in sent[:4]] == taken
    assert threading.current_thread() not in [thread for thread, _ in sent]


def test_encoders_are_dropped_each_for_itself_and_the_same_again():
    def make(index, drop_caption, dropped):
        return {"mean": np.zeros((2, 2, 4), np.float32), "dropped": np.array([n in dropped for n in ("clip_l", "t5")])}

    chances = {"clip_l": 0.5, "t5": 0.25, "clip_g": 0.0}
    batches = take(400, make=make, encoders=chances)
    dropped = np.concatenate([b.arrays["dropped"] for b in batches])
    assert abs(dropped[:, 0].mean() - 0.5) < 0.08
    assert abs(dropped[:, 1].mean() - 0.25) < 0.08
    assert abs(dropped.all(1).mean() - 0.125) < 0.06  # independent of each other
    again = take(10, make=make, encoders=chances, first=390)
    for a, b in zip(batches[390:], again, strict=True):
        np.testing.assert_array_equal(a.arrays["dropped"], b.arrays["dropped"])
