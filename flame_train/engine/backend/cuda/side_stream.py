"""A side stream, for work of a captured step whose results are not needed before the end of the backward pass.

A graph whose kernels form a single chain leaves multiprocessors idle as each kernel starts and drains. `run` puts work
on a second branch, where it can fill those gaps. The memory it uses must be kept until the branch is joined. Each `run`
joins the one before, so no more than one piece's memory is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dtype import Array
from ...mode import mode


class SideStream:
    """A second stream, forked from `stream` and joined to it. Outside a capture everything runs on `stream` itself."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._main, self._side = stream, cupy.cuda.Stream(non_blocking=True)
        self._begun, self._done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._held: tuple[Array, ...] | None = None

    def run(self, launch: Callable[[], None], *arrays: Array) -> None:
        """Calls `launch` on the branch. It must use no other arrays than these, and allocate no memory."""
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
        """Orders work queued on `stream` from now on after all work of the side stream."""
        if self._held is not None:
            self._done.record(self._side)
            self._main.wait_event(self._done)
            self._held = None

    def forget(self) -> None:
        """Drops what a failed capture left."""
        self._held = None
