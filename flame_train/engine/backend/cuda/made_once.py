"""Values that are slow to make and requested by several threads: each is made once, by the first of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
_MOST = 16  # threads: NVRTC gains nothing from more


class MadeOnce(dict[_K, _V], Generic[_K, _V]):
    """What was made, by key."""

    def __init__(self) -> None:
        super().__init__()
        self._making: dict[_K, Future[_V]] = {}
        self._lock = threading.Lock()

    def of(self, key: _K, make: Callable[[], _V]) -> _V:
        """The value of `key`. Raises what `make` does, to all who wait for it; the next to ask makes it again."""
        if key in self:
            return self[key]
        with self._lock:
            if key in self:
                return self[key]
            first = key not in self._making
            awaited = self._making.setdefault(key, Future())
        if first:
            self._make(key, make, awaited)
        return awaited.result()

    def _make(self, key: _K, make: Callable[[], _V], awaited: Future[_V]) -> None:
        try:
            made = make()
        except BaseException as e:
            with self._lock:
                del self._making[key]
            awaited.set_exception(e)
            return
        with self._lock:
            self[key] = made
            del self._making[key]
        awaited.set_result(made)


def started(calls: Iterable[Callable[[], Any]], share: int = 1, after: Sequence[Future[Any]] = ()) -> list[Future[Any]]:
    """Starts the calls, in their order, on threads. An error goes to who needs the value."""

    def called(call: Callable[[], Any]) -> Any:
        wait(after)
        return call()

    pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, _MOST) // share))
    begun = [pool.submit(called, call) for call in calls]
    pool.shutdown(wait=False)
    return begun
