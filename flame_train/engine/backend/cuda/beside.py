"""Work of a captured step that nothing waits for till the end of a backward pass, beside the main line of kernels.

A graph whose kernels all stand in one line leaves multiprocessors idle while each of them comes and goes. What is
`put` here goes on a branch of its own, one piece after another, and may fill such gaps. The memory it reads must stay
as it is until the branch is joined: the piece before is joined when the next is put, which bounds what is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dtype import Array
from ...mode import mode


class Beside:
    """One branch beside `stream`. Outside a capture everything is done in line."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._main, self._side = stream, cupy.cuda.Stream(non_blocking=True)
        self._begun, self._done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._held: tuple[Array, ...] | None = None

    def put(self, launch: Callable[[], None], *arrays: Array) -> None:
        """Does `launch`, which reads and writes no others than these arrays and takes no memory."""
        if not mode().capturing:
            launch()
            return
        self.join()
        self._begun.record(self._main)
        self._side.wait_event(self._begun)
        self._side.use()
        try:
            launch()
        finally:
            self._main.use()
        self._held = arrays

    def join(self) -> None:
        """What is queued from now on comes after all that was put here."""
        if self._held is not None:
            self._done.record(self._side)
            self._main.wait_event(self._done)
            self._held = None

    def forget(self) -> None:
        """Drops what a broken capture left."""
        self._held = None
