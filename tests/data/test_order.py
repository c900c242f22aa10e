"""The sample order: complete, pure, the same anywhere, and reachable at any step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.data.order import Batch, BatchSchedule, Bucket, caption_dropped, permutation

BUCKETS = [(64, 64), (64, 128), (128, 64)]
BUCKET_LISTS = st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**63)


ITEMS = st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(1, 4)), min_size=1, max_size=40)


def epoch_batches(
    bucket_of: Sequence[Bucket], repeats: int | Sequence[int], size: int, seed: int, epoch: int, fill: bool = True
) -> list[Batch]:
    return list(BatchSchedule(bucket_of, repeats, size, seed, fill=fill).epoch(epoch))


@given(ITEMS, st.integers(1, 7), SEEDS, st.integers(0, 1000), st.booleans())
def test_every_item_comes_exactly_repeats_times(
    items: list[tuple[tuple[int, int], int]], size: int, seed: int, epoch: int, fill: bool
) -> None:
    bucket_of, repeats = [bucket for bucket, _ in items], [n for _, n in items]
    batches = epoch_batches(bucket_of, repeats, size, seed, epoch, fill=fill)
    real = Counter[tuple[int, int]]()
    for batch in batches:
        assert len(batch.indices) == len(batch.draws)
        assert len(batch.indices) == size if fill else 1 <= len(batch.indices) <= size
        assert len({bucket_of[i] for i in batch.indices}) == 1
        kept = len(batch.indices) - batch.filled
        assert kept >= 1
        real.update(zip(batch.indices[:kept], batch.draws[:kept], strict=True))
    assert real == {(i, draw): 1 for i in range(len(bucket_of)) for draw in range(repeats[i])}
    order = BatchSchedule(bucket_of, repeats, size, seed, fill=fill)
    assert order.batches_per_epoch == len(batches)
    assert order.filled_per_epoch == sum(batch.filled for batch in batches)


@given(st.integers(1, 30), st.integers(1, 4), SEEDS, st.integers(0, 1000))
def test_one_number_for_all_numbers_the_comings_in_turn(items: int, repeats: int, seed: int, epoch: int) -> None:
    """The order that runs have been continued by since there is one: it may not change."""
    slots = permutation(items * repeats, "samples", seed, epoch, 64, 128)
    (batch,) = epoch_batches([(64, 128)] * items, repeats, items * repeats, seed, epoch)
    assert batch == Batch(tuple(slots // repeats), tuple(slots % repeats))


def test_each_item_has_its_repeats() -> None:
    with pytest.raises(ValueError, match="repeats for each of 2 items, got 1"):
        BatchSchedule([(64, 64)] * 2, [3], 1, 0)


@given(BUCKET_LISTS, st.integers(1, 3), st.integers(1, 5), SEEDS, st.lists(st.integers(0, 300), max_size=20))
@settings(max_examples=50)
def test_any_step_without_those_before_it(
    bucket_of: list[tuple[int, int]], repeats: int, size: int, seed: int, steps: list[int]
) -> None:
    order = BatchSchedule(bucket_of, repeats, size, seed)
    per_epoch = order.batches_per_epoch
    for step in steps:
        epoch = step // per_epoch
        assert order.epoch_of(step) == epoch
        expected = epoch_batches(bucket_of, repeats, size, seed, epoch)[step % per_epoch]
        assert order.batch_at(step) == expected


def test_seeds_epochs_and_buckets_differ() -> None:
    bucket_of = [(64, 64)] * 30
    seen = {tuple(epoch_batches(bucket_of, 1, 5, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(seen) == 16
    two = epoch_batches([(64, 64)] * 30 + [(64, 128)] * 30, 1, 30, 0, 0)
    first, second = (tuple(i % 30 for i in b.indices) for b in sorted(two, key=lambda b: min(b.indices)))
    assert first != second


def test_one_bucket_does_not_disturb_another() -> None:
    """More images of another shape change when a bucket's batches come, not what they hold."""
    few = epoch_batches([(64, 64)] * 9, 2, 4, 5, 3)
    more = epoch_batches([(64, 64)] * 9 + [(128, 64)] * 7, 2, 4, 5, 3)

    def square(batches: list[Batch]) -> set[Batch]:
        return {b for b in batches if max(b.indices) < 9}

    assert square(few) == square(more)


def test_filling_starts_the_bucket_anew() -> None:
    batches = epoch_batches([(64, 64)] * 3, 1, 8, 0, 0)
    (batch,) = batches
    assert batch.filled == 5
    assert batch.indices == (batch.indices[:3] * 3)[:8]
    assert sorted(batch.indices[:3]) == [0, 1, 2]
    (short,) = epoch_batches([(64, 64)] * 3, 1, 8, 0, 0, fill=False)
    assert (len(short.indices), short.filled) == (3, 0)


def test_every_permutation_is_about_as_likely() -> None:
    counts = Counter(tuple(permutation(3, "test", seed).tolist()) for seed in range(3000))
    assert len(counts) == 6
    chi_square = sum((n - 500) ** 2 / 500 for n in counts.values())
    assert chi_square < 25.7  # 5 degrees of freedom, p = 0.0001; a fixed outcome, not a chance one


def test_permutation_is_philox_sorted() -> None:
    """The words are those of Philox4x64-10 as published, by a second implementation."""
    import hashlib

    key = hashlib.sha256(b"samples|7|0").digest()[:16]
    words = philox4x64([int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")], 10)
    expected = sorted(range(10), key=lambda i: words[i])
    assert permutation(10, "samples", 7, 0).tolist() == expected


def philox4x64(key: list[int], count: int) -> list[int]:
    """Salmon et al. 2011, section 3.3: ten rounds. NumPy steps the counter before the first block."""
    mask, words, counter = 2**64 - 1, list[int](), 0
    while len(words) < count:
        counter += 1
        x, k = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * x[0], 2**64)
            high1, low1 = divmod(0xCA5A826395121157 * x[2], 2**64)
            x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        words += x
    return words[:count]


def test_same_in_another_process() -> None:
    code = (
        "from flame_train.data.order import *; "
        "print(list(BatchSchedule([(64, 64), (64, 128)] * 10, 2, 3, 42).epoch(7)), "
        "[caption_dropped(0.3, 42, 7, i) for i in range(50)])"
    )
    outputs = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert str(epoch_batches([(64, 64), (64, 128)] * 10, 2, 3, 42, 7)) in outputs.pop()


@pytest.mark.parametrize("bad", [([], 1, 1), ([(64, 64)], 0, 1), ([(64, 64)], 1, 0)])
def test_nothing_to_order(bad: tuple[list[tuple[int, int]], int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BatchSchedule(*bad, seed=0)


def test_steps_count_from_zero() -> None:
    with pytest.raises(ValueError, match="from 0"):
        BatchSchedule([(64, 64)], 1, 1, 0).batch_at(-1)


def test_caption_dropout_rate_and_ends() -> None:
    draws = [(e, i, d) for e in range(10) for i in range(500) for d in range(2)]
    for probability in (0.05, 0.5, 0.9):
        rate = np.mean([caption_dropped(probability, 3, *draw) for draw in draws])
        assert abs(rate - probability) < 4 * (probability * (1 - probability) / len(draws)) ** 0.5
    assert not any(caption_dropped(0.0, 3, *draw) for draw in draws)
    assert all(caption_dropped(1.0, 3, *draw) for draw in draws)


@given(SEEDS, st.integers(0, 99), st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_caption_dropout_is_pure_and_grows_with_its_probability(
    seed: int, epoch: int, index: int, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    assert caption_dropped(low, seed, epoch, index) == caption_dropped(low, seed, epoch, index)
    assert caption_dropped(low, seed, epoch, index) <= caption_dropped(high, seed, epoch, index)


def test_a_weight_says_how_often_items_come_and_none_is_forgotten() -> None:
    order = BatchSchedule([(64, 64)] * 30, 1, 1, 5, weights=[1.0] * 10 + [0.25] * 12 + [2.0] * 5 + [0.0] * 3)
    epochs = [Counter(i for batch in order.epoch(e) for i in batch.indices) for e in range(4)]
    for epoch in epochs:
        assert [epoch[i] for i in range(10)] == [1] * 10
        assert sum(epoch[i] for i in range(10, 22)) == 3
        assert [epoch[i] for i in range(22, 27)] == [2] * 5
        assert not any(epoch[i] for i in range(27, 30))
    assert [sum(epoch[i] for epoch in epochs) for i in range(10, 22)] == [1] * 12
    assert order.samples_per_epoch == 23


def test_samples_of_an_item_in_an_epoch_have_numbers_of_their_own() -> None:
    order = BatchSchedule([(64, 64)] * 3, [2, 1, 1], 2, 5, weights=[2.5] * 3)
    for e in range(5):
        seen = [pair for batch in order.epoch(e) for pair in zip(batch.indices, batch.draws, strict=True)]
        assert len(seen) == len(set(seen)) == 10


def test_batches_mix_no_batch_sizes() -> None:
    sizes = [1, 1, 1, 3, 3, 3, 3]
    order = BatchSchedule([(64, 64)] * 7, 1, sizes, 5)
    assert Counter(len(batch.indices) for batch in order.epoch(0)) == {1: 3, 3: 2}
    for batch in order.epoch(0):
        assert {sizes[i] for i in batch.indices} == {len(batch.indices)}


def test_all_weights_zero_is_no_order() -> None:
    with pytest.raises(ValueError, match="a weight above 0"):
        BatchSchedule([(64, 64)] * 2, 1, 1, 5, weights=[0.0, 0.0])
