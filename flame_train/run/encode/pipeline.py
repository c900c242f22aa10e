"""Items through a device in batches: made ready and kept by threads while the device works on others."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from flame_train.models.common.model import Example

_Item = TypeVar("_Item")
_Ready = TypeVar("_Ready")
_THREADS = 8
_AHEAD = 32  # items that are made ready before their turn, beside those of a batch: at most 12 MiB each
_UNKEPT = 64  # results that wait to be written


@dataclass(frozen=True, slots=True)
class _Started(Generic[_Item]):
    """A batch that the device works on."""

    items: Sequence[_Item]
    wait: Callable[[], list[Example]]


class Pipeline(Generic[_Item, _Ready]):
    """What is done with each item: made ready, computed in a batch, kept.

    Attributes:
        ready: reads an item, on a thread.
        start: starts a batch of such on the device; calling the result waits for the arrays of each.
        keep: writes an item's arrays: on a thread where the device works by itself, else in the order of the items.
        overlapped: whether the device does.
    """

    def __init__(
        self,
        ready: Callable[[_Item], _Ready],
        start: Callable[[Sequence[_Ready]], Callable[[], list[Example]]],
        keep: Callable[[_Item, Example], None],
        overlapped: bool,
    ) -> None:
        self._ready, self._start, self._keep, self._overlapped = ready, start, keep, overlapped
        self._unkept = deque[Future[None]]()

    def run(self, batches: Sequence[Sequence[_Item]], after: Callable[[int], None]) -> None:
        """All batches in their order. After each, `after` gets the number of finished items. It may raise.

        Whatever ends it, what the device has given by then is kept. Raises what one of the functions does.
        """
        with _threads() as readers, _threads() as self._writers:
            coming = self._read(batches, readers)
            started: _Started[_Item] = _Started((), list)
            done = 0
            try:
                for batch in batches:
                    ready = self._taken(coming, len(batch), started)
                    following = _Started(batch, self._start(ready))
                    if self._overlapped:
                        started, following = following, started
                    done += self._finish(following)
                    after(done)
                after(done + self._finish(started))
            finally:
                while self._unkept:
                    self._unkept.popleft().result()

    def _taken(self, coming: Iterator[Future[_Ready]], count: int, started: _Started[_Item]) -> list[_Ready]:
        """The next items, read. If one cannot be, what was started before is still kept."""
        try:
            return [next(coming).result() for _ in range(count)]
        except BaseException:
            self._finish(started)
            raise

    def _read(self, batches: Sequence[Sequence[_Item]], readers: ThreadPoolExecutor) -> Iterator[Future[_Ready]]:
        """The items of all batches as they are read, always some ahead."""
        waiting = deque[Future[_Ready]]()
        ahead = _AHEAD + max(map(len, batches), default=0)
        for item in (item for batch in batches for item in batch):
            waiting.append(readers.submit(self._ready, item))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting

    def _finish(self, started: _Started[_Item]) -> int:
        """Keeps what a batch gave, once it has; how many items that were."""
        for item, example in zip(started.items, started.wait(), strict=True):
            if not self._overlapped:
                self._keep(item, example)
                continue
            if len(self._unkept) == _UNKEPT:
                self._unkept.popleft().result()
            self._unkept.append(self._writers.submit(self._keep, item, example))
        return len(started.items)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that end with the block; what they have not begun by then is left."""
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
