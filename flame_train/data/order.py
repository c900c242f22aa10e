"""The order of samples: a pure function of (seed, epoch), so that resuming needs no saved state.

Random numbers are raw Philox words (Salmon et al. 2011) under a key hashed from their purpose. NumPy
promises those words for ever, unlike its `shuffle` and `permutation`: a permutation here is a stable sort
of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Bucket = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one bucket. `draws[i]` numbers, from 0, the comings of item `indices[i]` in an epoch."""

    indices: tuple[int, ...]
    draws: tuple[int, ...]
    bucket: Bucket
    filled: int = 0  # of its samples, how many at the end repeat others to make it full


class Order:
    """The batches of every epoch, by step.

    Batches never mix buckets. An epoch holds each item as often as its repeats say; filling adds some more.
    """

    def __init__(
        self,
        bucket_of: Sequence[Bucket],
        repeats: int | Sequence[int],
        batch_size: int,
        seed: int,
        *,
        fill: bool = True,
    ) -> None:
        """Groups the items by bucket.

        Args:
            bucket_of: the bucket of each item.
            repeats: how often each item comes in one epoch, one number for all or one for each.
            batch_size: items in a batch.
            seed: seed of the order.
            fill: whether the last batch of a bucket is filled up with items of the same bucket.

        Raises:
            ValueError: there are no items, a number is below 1, or `repeats` has another length.
        """
        each = [repeats] * len(bucket_of) if isinstance(repeats, int) else repeats
        if len(each) != len(bucket_of):
            raise ValueError(f"an order needs repeats for each of {len(bucket_of)} items, got {len(each)}")
        if not bucket_of or min(each) < 1 or batch_size < 1:
            raise ValueError(
                f"an order needs items, repeats and a batch size of at least 1 each, "
                f"got {len(bucket_of)}, {repeats} and {batch_size}"
            )
        members: dict[Bucket, list[int]] = {}
        for index, bucket in enumerate(bucket_of):
            members.setdefault(bucket, []).append(index)
        self._comings = {bucket: _comings(inside, [each[i] for i in inside]) for bucket, inside in members.items()}
        self._batch_size, self._seed, self._fill = batch_size, seed, fill
        self._last: tuple[int, tuple[Batch, ...]] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The same for every epoch."""
        return sum(-(-len(items) // self._batch_size) for items, _ in self._comings.values())

    @property
    def filled_per_epoch(self) -> int:
        """How many samples of an epoch are there only to make batches full."""
        if not self._fill:
            return 0
        return sum(-len(items) % self._batch_size for items, _ in self._comings.values())

    def epoch_of(self, step: int) -> int:
        """The epoch that step (from 0) lies in."""
        return step // self.batches_per_epoch

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs. Steps may come in any order."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        epoch, within = divmod(step, self.batches_per_epoch)
        last = self._last
        if last is None or last[0] != epoch:
            last = self._last = epoch, self.epoch(epoch)
        return last[1][within]

    def epoch(self, epoch: int) -> tuple[Batch, ...]:
        """All batches of an epoch (from 0), in order."""
        batches: list[Batch] = []
        for bucket in sorted(self._comings):
            batches += self._bucket_batches(bucket, epoch)
        shuffled = permutation(len(batches), "batches", self._seed, epoch)
        return tuple(batches[i] for i in shuffled)

    def _bucket_batches(self, bucket: Bucket, epoch: int) -> list[Batch]:
        (items, draws), size = self._comings[bucket], self._batch_size
        count = len(items)
        slots = permutation(count, "samples", self._seed, epoch, *bucket)
        batches = []
        for start in range(0, count, size):
            filled = max(0, start + size - count) if self._fill else 0
            taken = np.concatenate([slots[start : start + size], slots[np.arange(filled) % count]])
            batches.append(Batch(tuple(items[taken].tolist()), tuple(draws[taken].tolist()), bucket, filled))
        return batches


def _comings(items: Sequence[int], repeats: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All comings of some items in an epoch, item by item: which it is, and its how many-th, from 0."""
    counts = np.array(repeats)
    whose = np.repeat(items, counts)
    return whose, np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)


def epoch_batches(
    bucket_of: Sequence[Bucket],
    repeats: int | Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
    *,
    fill: bool = True,
) -> list[Batch]:
    """The batches of one epoch: `Order(...).epoch(epoch)` as a list.

    Args:
        bucket_of, repeats, batch_size, seed, fill: as in `Order`.
        epoch: the number of the epoch, from 0.

    Returns:
        The batches in order.
    """
    return list(Order(bucket_of, repeats, batch_size, seed, fill=fill).epoch(epoch))


def caption_dropped(probability: float, seed: int, epoch: int, index: int, draw: int = 0, part: str = "") -> bool:
    """Whether a sample is seen without its caption; a pure function of the arguments.

    Args:
        probability: the share of samples for which the result is true.
        seed: the run's seed.
        epoch: the number of the epoch.
        index: the item.
        draw: which of the item's samples in this epoch.
        part: the name of a part of the caption, or of an encoder, that is dropped by itself; "" is the whole.

    Returns:
        True if the caption or the part is dropped.
    """
    word = int.from_bytes(_key(f"caption dropout {part}".rstrip(), seed, epoch, index, draw)[:8], "little")
    return word >> 11 < probability * 2**53  # 53 bits: exact in a float, so 0 is never and 1 always


def permutation(count: int, purpose: str, seed: int, *where: int) -> np.ndarray[Any, Any]:
    """int64 (count,): 0..count-1 shuffled, by (purpose, seed, where) alone."""
    key = np.frombuffer(_key(purpose, seed, *where)[:16], dtype="<u8").astype(np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    return np.argsort(words, kind="stable")


def _key(purpose: str, *numbers: int) -> bytes:
    """32 bytes that differ for every purpose and list of integers, of any size and sign."""
    return hashlib.sha256("|".join([purpose, *map(str, numbers)]).encode()).digest()
