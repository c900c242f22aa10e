"""The order of samples and what each is seen with, by (seed, epoch) alone, so that resuming needs no saved state.

Random numbers are raw Philox words (Salmon et al. 2011) under a key hashed from their purpose. NumPy
promises those words for ever, unlike its `shuffle` and `permutation`: a permutation here is a stable sort
of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to see a sample: a view and a text by number, and what is dropped.

    `dropped` are the keys of text encoders. The default is what validation sees.
    """

    view: int = 0
    text: int = 0
    drop_caption: bool = False
    dropped: frozenset[str] = frozenset()


FIRST = Choice()


@dataclass(frozen=True, slots=True)
class Choices:
    """Makes the choices of a run.

    Attributes:
        seed: the run's seed.
        caption_dropout: the probability that a caption is dropped, of each sample.
        encoder_dropout: the probability that a text encoder is dropped, by its key; independent of captions.
        views: how many views each sample has.
        texts: how many texts each sample has.
    """

    seed: int
    caption_dropout: Sequence[float]
    encoder_dropout: Mapping[str, float]
    views: Sequence[int]
    texts: Sequence[int]

    def of(self, epoch: int, index: int, draw: int) -> Choice:
        """Returns how sample `index` is seen when it comes for the `draw`-th time, from 0, in an epoch."""
        where = (self.seed, epoch, index, draw)
        dropped = (name for name, p in self.encoder_dropout.items() if caption_dropped(p, *where, name))
        return Choice(
            view=self._one_of(self.views[index], "view", where),
            text=self._one_of(self.texts[index], "text", where),
            drop_caption=caption_dropped(self.caption_dropout[index], *where),
            dropped=frozenset(dropped),
        )

    @staticmethod
    def _one_of(count: int, purpose: str, where: tuple[int, ...]) -> int:
        return int(fraction(purpose, *where) * count) if count > 1 else 0


Bucket = tuple[int, ...]  # sides that the samples of a batch share
Group = tuple[Bucket, int]  # a bucket, and the size of its batches
Repeats = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Items, and the number of each repeat of an item in the epoch, from 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one bucket. `draws[i]` numbers, from 0, the repeats of item `indices[i]` in an epoch."""

    indices: tuple[int, ...]
    draws: tuple[int, ...]
    filled: int = 0  # of its samples, how many at the end repeat others to make it full


class BatchSchedule:
    """The batches of every epoch, by step.

    Batches never mix buckets or batch sizes. An epoch holds each item as often as its repeats say, times its weight;
    filling adds some more. Items of a weight other than 1 take turns: each pass over them goes on in the next epoch.
    """

    def __init__(
        self,
        bucket_of: Sequence[Bucket],
        repeats: int | Sequence[int],
        batch_size: int | Sequence[int],
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        fill: bool = True,
        group: int = 1,
    ) -> None:
        """Sorts the items by bucket and batch size.

        Args:
            bucket_of: the bucket of each item.
            repeats: how often each item comes in one epoch, one number for all or one for each.
            batch_size: items in a batch, one number for all or one for each item.
            weights: factor on the repeats of each item; 0 leaves it out. None: 1 for all.
            fill: whether the last batch of a bucket is filled up with items of the same bucket.
            group: how many items, one after another, stand together in a batch; all is said of the first of them.

        Raises:
            ValueError: there are no items, a number is below 1, all weights are 0, or a list has another length.
        """
        count = len(bucket_of)
        each = [repeats] * count if isinstance(repeats, int) else repeats
        sizes = [batch_size] * count if isinstance(batch_size, int) else batch_size
        shares = [1.0] * count if weights is None else weights
        for what, given in {"repeats": each, "a batch size": sizes, "a weight": shares}.items():
            if len(given) != count:
                raise ValueError(f"an order needs {what} for each of {count} items, got {len(given)}")
        if not count or min(each) < 1 or min(sizes) < 1 or min(shares) < 0 or not any(shares):
            raise ValueError(
                f"an order needs items, repeats and a batch size of at least 1 each and a weight above 0, "
                f"got {count}, {repeats}, {batch_size} and {weights}"
            )
        members: dict[Group, dict[float, list[int]]] = {}
        for index in range(0, count, group):
            bucket, size, share = bucket_of[index], sizes[index] // group, shares[index]
            if share:
                members.setdefault((bucket, size), {}).setdefault(share, []).append(index)
        self._turns = {
            group: [_Turns(_repeats_of(inside, [each[i] for i in inside]), share) for share, inside in by_share.items()]
            for group, by_share in members.items()
        }
        self._mixed = len({size for _, size in self._turns}) > 1
        self._seed, self._fill, self.group = seed, fill, group
        self._last: tuple[int, tuple[Batch, ...]] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The same for every epoch."""
        return sum(-(-count // size) for size, count in self._counts())

    @property
    def filled_per_epoch(self) -> int:
        """How many samples of an epoch are there only to make batches full."""
        if not self._fill:
            return 0
        return sum(-count % size for size, count in self._counts()) * self.group

    @property
    def samples_per_epoch(self) -> int:
        """How many samples an epoch has, those that fill batches included."""
        return sum(count for _, count in self._counts()) * self.group + self.filled_per_epoch

    @property
    def largest_batch(self) -> int:
        """The samples of the largest batch."""
        return max(size for _, size in self._turns) * self.group

    @property
    def fullest(self) -> tuple[int, int]:
        """(batch size, samples in an epoch) of the group whose samples fill most of their batches."""
        size, count = max(self._counts(), key=lambda each: each[1] / each[0])
        return size * self.group, count * self.group

    def _counts(self) -> list[tuple[int, int]]:
        """Returns (batch size, samples in an epoch) of each bucket and batch size, in groups of items."""
        return [(size, sum(turns.per_epoch for turns in parts)) for (_, size), parts in self._turns.items()]

    def epoch_of(self, step: int) -> int:
        """Returns the epoch that step (from 0) lies in."""
        return step // self.batches_per_epoch

    def batch_at(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0 over all epochs. Steps may come in any order."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        epoch, within = divmod(step, self.batches_per_epoch)
        last = self._last
        if last is None or last[0] != epoch:
            last = self._last = epoch, self.epoch(epoch)
        return last[1][within]

    def epoch(self, epoch: int) -> tuple[Batch, ...]:
        """Returns all batches of an epoch (from 0), in order."""
        batches: list[Batch] = []
        for group in sorted(self._turns):
            batches += self._group_batches(group, epoch)
        shuffled = permutation(len(batches), "batches", self._seed, epoch)
        return tuple(batches[i] for i in shuffled)

    def _group_batches(self, group: Group, epoch: int) -> list[Batch]:
        bucket, size = group
        where = (*bucket, size) if self._mixed else bucket
        parts = [turns.of(epoch, self._seed, where) for turns in self._turns[group]]
        items, draws = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        count = len(items)
        slots = permutation(count, "samples", self._seed, epoch, *where)
        batches = []
        for start in range(0, count, size):
            filled = max(0, start + size - count) if self._fill else 0
            taken = np.concatenate([slots[start : start + size], slots[np.arange(filled) % count]])
            indices = (items[taken][:, None] + np.arange(self.group)).ravel()
            repeats = np.repeat(draws[taken], self.group)
            batches.append(Batch(tuple(indices.tolist()), tuple(repeats.tolist()), filled * self.group))
        return batches


class _Turns:
    """The repeats of the items of one group and weight, of which an epoch takes as many as the weight says."""

    def __init__(self, repeats: Repeats, weight: float) -> None:
        self._items, self._draws = repeats
        self._weight = weight
        self.per_epoch = max(1, round(len(self._items) * weight))

    def of(self, epoch: int, seed: int, where: tuple[int, ...]) -> Repeats:
        """Items and their repeats in an epoch: of weight 1 all, else the next of an endless row of shuffled passes."""
        if self._weight == 1.0:
            return self._items, self._draws
        count, first = len(self._items), epoch * self.per_epoch
        most = int(self._draws.max()) + 1
        items, draws = [], []
        for number in range(first // count, -(-(first + self.per_epoch) // count)):
            order = permutation(count, f"turns {self._weight!r}", seed, number, *where)
            taken = order[max(0, first - number * count) : first + self.per_epoch - number * count]
            items.append(self._items[taken])
            draws.append(self._draws[taken] + most * (number - first // count))
        return np.concatenate(items), np.concatenate(draws)


def _repeats_of(items: Sequence[int], repeats: Sequence[int]) -> Repeats:
    """Returns all repeats of some items in an epoch, item by item: the item, and the number of the repeat, from 0."""
    counts = np.array(repeats)
    whose = np.repeat(items, counts)
    return whose, np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)


def caption_dropped(probability: float, seed: int, epoch: int, index: int, draw: int = 0, part: str = "") -> bool:
    """Says whether a sample is seen without its caption; a pure function of the arguments.

    Args:
        probability: the share of samples for which the result is true.
        index: the sample's number in the data.
        draw: which of the item's samples in this epoch.
        part: the name of a part of the caption, or of an encoder, that is dropped by itself; "" is the whole.
    """
    word = int.from_bytes(_key(f"caption dropout {part}".rstrip(), seed, epoch, index, draw)[:8], "little")
    return word >> 11 < probability * 2**53  # 53 bits: exact in a float, so 0 is never and 1 always


def fraction(purpose: str, *where: int) -> float:
    """Returns a number in [0, 1) of 53 bits, by (purpose, where) alone."""
    return (int.from_bytes(_key(purpose, *where)[:8], "little") >> 11) / 2**53


def permutation(count: int, purpose: str, seed: int, *where: int) -> np.ndarray[Any, Any]:
    """Returns int64 (count,): 0..count-1 shuffled, by (purpose, seed, where) alone."""
    key = np.frombuffer(_key(purpose, seed, *where)[:16], dtype="<u8").astype(np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    return np.argsort(words, kind="stable")


def _key(purpose: str, *numbers: int) -> bytes:
    """Returns 32 bytes that differ for every purpose and list of integers, of any size and sign."""
    return hashlib.sha256("|".join([purpose, *map(str, numbers)]).encode()).digest()
