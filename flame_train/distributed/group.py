"""A group of processes that train together: sums over them, and errors that end all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from flame_train.engine.dtype import Array
from flame_train.errors import Interrupted, NonFiniteError, OtherRankFailed, exit_status


class Collectives(Protocol):
    """What a transport gives. Every process of the group makes the same calls in the same order."""

    @property
    def captured(self) -> bool:
        """Whether `all_reduce` can be part of a captured step."""

    def all_reduce(self, array: Array) -> None:
        """Makes a contiguous array of the device, fp32 or bf16, the sum over all processes, in place."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of each process, by rank. Waits for all."""

    def abort(self, code: int) -> None:
        """Ends all processes with this exit code where the transport can, else this one. Does not return."""


@dataclass(eq=False)
class ProcessGroup:
    """Process `rank` of `world` that train together. A process by itself does nothing here."""

    rank: int = 0
    world: int = 1
    collectives: Collectives | None = None
    met: int = 0
    """How many meetings with the others this process came to."""
    waits: bool = False
    """Whether it is in one, and waits for them."""
    _agreed: list[BaseException] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and speaks to the user."""
        return self.rank == 0

    @property
    def captured(self) -> bool:
        """Whether `all_reduce` can be part of a captured step."""
        return self.collectives is None or self.collectives.captured

    def all_reduce(self, array: Array) -> None:
        """Makes a contiguous array, fp32 or bf16, the sum over all processes, in place."""
        if self.collectives is not None:
            with self.meeting():
                self.collectives.all_reduce(array)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Marks that this process waits for all others. `Watch` ends all of them where one does not come."""
        self.met += 1
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def all_gather(self, text: str) -> list[str]:
        """Returns the text of each process, by rank."""
        if self.collectives is None:
            return [text]
        with self.meeting():
            gathered = self.collectives.all_gather(_encoded(text))
        return [raw.decode("utf-8", "surrogatepass") for raw in gathered]

    def broadcast(self, answer: bool) -> bool:
        """Gives the leading process's answer, in all: where each looks at a shared disk, one may see an older state."""
        return self.all_gather("yes" if answer else "no")[0] == "yes"

    @contextmanager
    def barrier(self, alone: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
        """Waits at the end of the block for all processes. If one of them failed in it, all of them fail.

        Args:
            alone: tells errors that end this process at once, which therefore ends all of them.

        Raises:
            OtherRankFailed: another process failed in this block, and this one did not.
        """
        if self.collectives is None:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            if alone(e):
                raise
            error = e
        outcome = None if error is None else {"code": exit_status(error), "message": str(error)}
        ended = [json.loads(text) for text in self.all_gather(json.dumps(outcome))]
        failed = next((rank for rank, outcome in enumerate(ended) if outcome is not None), None)
        if failed is None:
            return
        first, mine = ended[failed], ended[self.rank]
        if error is None or (failed < self.rank and mine == first):
            error = OtherRankFailed(first["code"], f"rank {failed} failed: {first['message']}", not self.leads)
        self._agreed.append(error)
        raise error

    def is_shared(self, error: BaseException) -> bool:
        """Tells whether all processes end with this error, or with the news of it; so that none waits for another."""
        return self.world == 1 or error in self._agreed or isinstance(error, NonFiniteError | Interrupted)

    def share(self, items: int) -> range:
        """Returns the items, by number, that are this process's part of some work."""
        return range(self.rank, items, self.world)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Silent:
    """A transport to processes that are not there."""

    captured = True

    def all_reduce(self, array: Array) -> None:
        pass

    def all_gather(self, data: bytes) -> list[bytes]:
        raise AssertionError("a run on shapes asks no other process")

    def abort(self, code: int) -> None:
        raise AssertionError("a run on shapes ends no other process")


def simulated_group(processes: int) -> ProcessGroup:
    """Returns the first of so many processes, without the others: for runs on shapes alone."""
    return ProcessGroup(0, processes, _Silent() if processes > 1 else None)


ALONE: Final = ProcessGroup()
