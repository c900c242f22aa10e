"""Where memory goes: what each op makes and works in, what lives at the peak, what a graph keeps for its backward pass.

Weights, inputs and the leaves' own gradient buffers are not counted: ops did not make them. Nothing is read from the
device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .autograd.graph import Node, arrays_in
from .backend import backend_of, owner
from .dtype import Array
from .mode import op_hooks
from .tensors.tensor import Tensor

Key = tuple[str, str]
"""An op's name and "forward" or "backward"."""


_UNNOTICED = 1 << 16
"""Bytes of an op's work that may be Python's own objects, or what a pool rounds sizes up by, and are not counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op in one phase.

    - `calls`: how often it ran.
    - `made`: the bytes of the arrays it made.
    - `passing`: the most bytes that one call took beside those and gave back before it ended.
    - `at_peak`: how many bytes of `made` and `passing` were there at the peak.
    """

    op: str
    phase: str
    calls: int
    made: int
    passing: int
    at_peak: int


@dataclass(slots=True)
class _Running:
    """An op that has begun: `live` bytes were there, and `most` ends the watch and says what it took at once."""

    key: Key
    live: int
    most: Callable[[], int]
    innermost: bool = True


@dataclass(slots=True)
class MemoryReport:
    """Bytes that ops take inside `memory_report`: those of the arrays they made that are alive now, and the peak.

    Arrays freed after the block are still subtracted from `live`. The peak includes what an op works in, where that is
    more than 64 KiB; not inside a captured step, whose memory is a graph's.
    """

    live: int = 0
    peak: int = 0
    _calls: Counter[Key] = field(default_factory=Counter)
    _made: Counter[Key] = field(default_factory=Counter)
    _passing: Counter[Key] = field(default_factory=Counter)
    _living: Counter[Key] = field(default_factory=Counter)
    _at_peak: Counter[Key] = field(default_factory=Counter)
    _watched: dict[int, weakref.ref[Array]] = field(default_factory=dict)
    _others: dict[int, weakref.ref[Array]] = field(default_factory=dict)
    _running: list[_Running] = field(default_factory=list)

    def before(self, op: str, phase: str, arrays: list[Array]) -> None:
        """An op starts. Its inputs that no op made are noted as `_others`: neither they nor views of them count."""
        self._calls[op, phase] += 1
        for root in map(owner, arrays):
            place = id(root)
            if place not in self._watched and place not in self._others and not isinstance(root, np.generic):
                self._others[place] = weakref.ref(root, partial(self._forget, place))
        if arrays:  # the body of a composite has none: the ops in it report themselves
            for outer in self._running:
                outer.innermost = False
            self._running.append(_Running((op, phase), self.live, backend_of(arrays[0]).watch_peak()))

    def _forget(self, place: int, _: weakref.ref[Array]) -> None:
        del self._others[place]

    def after(self, op: str, phase: str, arrays: list[Array]) -> None:
        """An op made `arrays`. Those that are views of known memory, or NumPy scalars, are not counted."""
        taken = self._ended((op, phase))
        for array in arrays:
            root = owner(array)
            known = id(root) in self._watched or id(root) in self._others
            if not known and root.nbytes and not isinstance(root, np.generic):
                self._watch(root, (op, phase))
        passing = taken - self.live
        if passing <= _UNNOTICED:
            passing = 0
        self._passing[op, phase] = max(self._passing[op, phase], passing)
        if self.live + passing > self.peak:
            self.peak, self._at_peak = self.live + passing, self._living + Counter({(op, phase): passing})

    def _ended(self, key: Key) -> int:
        """Returns the most bytes while the op ran; 0 if ops that ran inside it have reported their own."""
        while self._running:
            ended = self._running.pop()
            most = ended.live + ended.most()
            if ended.key == key:  # others were left by an exception
                return most if ended.innermost else 0
        return 0

    def close(self) -> None:
        """Ends the watches of ops that an exception left."""
        while self._running:
            self._running.pop().most()

    def _watch(self, root: Array, key: Key) -> None:
        place, size = id(root), int(root.nbytes)

        def freed(_: weakref.ref[Array]) -> None:
            del self._watched[place]
            self.live -= size
            self._living[key] -= size

        self._watched[place] = weakref.ref(root, freed)
        self.live += size
        self._made[key] += size
        self._living[key] += size

    def rows(self) -> list[Row]:
        """Returns one row an op and phase, the largest share of the peak first."""
        found = [
            Row(*key, n, self._made[key], self._passing[key], self._at_peak[key]) for key, n in self._calls.items()
        ]
        return sorted((r for r in found if r.phase != "body"), key=lambda r: (-r.at_peak, -r.made, r.op, r.phase))

    def table(self) -> str:
        """Returns the rows as text, in MiB."""
        head = f"{'op':<32}{'phase':<10}{'calls':>7}{'made':>12}{'passing':>12}{'at peak':>12}"
        lines = [
            f"{r.op:<32}{r.phase:<10}{r.calls:>7}{_mib(r.made):>12}{_mib(r.passing):>12}{_mib(r.at_peak):>12}"
            for r in self.rows()
        ]
        return "\n".join([head, *lines, f"{'live ' + _mib(self.live):<61}{'peak':>12}{_mib(self.peak):>12}"])


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


@contextmanager
def memory_report() -> Iterator[MemoryReport]:
    """Counts what ops take inside: `with memory_report() as report: step()`, then `print(report.table())`.

    On the CPU Python's own tracing of memory sees it, so the step is slower, and other threads' work is counted too.
    """
    report = MemoryReport()
    try:
        with op_hooks(report):
            yield report
    finally:
        report.close()


def saved_by_op(*outputs: Tensor, besides: Iterable[Any] = ()) -> dict[str, int]:
    """Bytes that the graph of `outputs` keeps for its backward pass, by op; memory that several keep counts once.

    Leaves are left out, as they are alive anyway. So are the tensors in `besides`: the graph cannot tell Frozen weights
    from activations.
    """
    nodes = _nodes(outputs)
    seen = {id(owner(edge.leaf.data)) for node in nodes for edge in node.edges if edge.leaf is not None}
    seen |= {id(owner(array)) for array in arrays_in(besides)}
    found: Counter[str] = Counter()
    for node in nodes:
        for array in node.saved_arrays:
            root = owner(array)
            if id(root) not in seen:
                seen.add(id(root))
                found[node.name] += int(root.nbytes)
    return dict(found.most_common())


def _nodes(outputs: Sequence[Tensor]) -> list[Node]:
    """Returns every node of the graph of `outputs`, in the order in which they ran."""
    found: dict[int, Node] = {}
    stack = [t._node for t in outputs]
    while stack:
        node = stack.pop()
        if node is not None and id(node) not in found:
            found[id(node)] = node
            stack.extend(edge.node for edge in node.edges)
    return sorted(found.values(), key=lambda node: node.seq)
