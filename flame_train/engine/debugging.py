"""Finding a bug: the first op that makes NaN or infinity, and the backward pass op by op."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import NonFiniteError
from .autograd.graph import Node
from .backend import backend_of
from .dtype import Array, float64, is_float
from .mode import mode, op_hooks, watching
from .user_line import user_line

_PUTS_INFINITY = frozenset({"masked_fill", "pad", "scatter", "where"})
"""Ops that put in a number that they are given, such as the -inf of a mask: there infinity is meant."""


@contextmanager
def detect_anomaly() -> Iterator[None]:
    """Inside, the first op that makes NaN or infinity of finite values, forward or backward, raises `NonFiniteError`.

    The message has the op, the shapes and dtypes of what it took and made, and the line of your code that called it.
    As torch.autograd.set_detect_anomaly, which looks at NaN in the backward pass alone. Every op is looked at on the
    host, which a GPU waits for: for searching, not for training. A mask's -inf is no anomaly.

    >>> import flame_train.engine as flame
    >>> with detect_anomaly():
    ...     flame.tensor([0.0]).log()
    Traceback (most recent call last):
    flame_train.errors.NonFiniteError: log made -inf, forward, of finite values: (1,) float32 -> (1,) float32...
    """
    watch = _Anomalies()
    with op_hooks(watch), watching(watch):
        yield


class _Anomalies:
    """Looks at what every op takes and makes."""

    def __init__(self) -> None:
        self._given: list[list[Array]] = []

    def before(self, op: str, phase: str, arrays: list[Array]) -> None:
        if phase == "forward":
            if mode().capturing:
                raise RuntimeError("detect_anomaly: a captured step reads nothing back; run the step without capture")
            self._given.append(arrays)

    def after(self, op: str, phase: str, arrays: list[Array]) -> None:
        if phase == "forward":
            self._look(op, phase, self._given.pop(), arrays, user_line())

    def before_node(self, node: Node, grads: Sequence[Array | None]) -> None:
        pass

    def after_node(self, node: Node, grads: Sequence[Array | None], sent: Sequence[Array | None]) -> None:
        self._look(node.name, "backward", _present(grads), _present(sent), node.line)

    def _look(self, op: str, phase: str, given: Sequence[Array], made: Sequence[Array], line: str) -> None:
        if not all(_worst(a) == "" for a in given):
            return  # an op before this one made it, or it was given
        for a in made:
            bad = _worst(a)
            if bad and not (bad != "nan" and op in _PUTS_INFINITY):
                raise NonFiniteError(
                    f"{op} made {bad}, {phase}, of finite values: {_shown(given)} -> {_shown(made)}; called at {line}"
                )


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One op of a backward pass. Norms are L2; `ms` is wall time, the device's work included."""

    op: str
    line: str
    grads: tuple[tuple[int, ...], ...]
    grad_norms: tuple[float, ...]
    sent: tuple[tuple[int, ...], ...]
    sent_norms: tuple[float, ...]
    ms: float


@dataclass(slots=True)
class Trace:
    """The backward passes run inside `trace`: a row an op, in the order in which they ran."""

    rows: list[TraceRow] = field(default_factory=list)
    _begun: list[float] = field(default_factory=list)

    def before_node(self, node: Node, grads: Sequence[Array | None]) -> None:
        node.backend.synchronize()
        self._begun.append(time.perf_counter())

    def after_node(self, node: Node, grads: Sequence[Array | None], sent: Sequence[Array | None]) -> None:
        node.backend.synchronize()
        ms = 1e3 * (time.perf_counter() - self._begun.pop())
        given, made = _present(grads), _present(sent)
        shapes = [tuple(tuple(a.shape) for a in arrays) for arrays in (given, made)]
        norms = [tuple(_norm(a) for a in arrays) for arrays in (given, made)]
        self.rows.append(TraceRow(node.name, node.line, shapes[0], norms[0], shapes[1], norms[1], ms))

    def table(self) -> str:
        """Returns the rows as text."""
        head = f"{'op':<28}{'gradient':<30}{'sent on':<44}{'ms':>8}  line"
        return "\n".join([head, *(_told(row) for row in self.rows)])


@contextmanager
def trace() -> Iterator[Trace]:
    """Records every op of the backward passes inside: gradients' shapes and norms, time, and the line that called it.

    >>> import flame_train.engine as flame
    >>> with trace() as found:
    ...     flame.ones(3, requires_grad=True).exp().sum().backward()
    >>> [row.op for row in found.rows]
    ['sum', 'exp']
    """
    found = Trace()
    with watching(found):
        yield found


def _present(arrays: Sequence[Array | None]) -> list[Array]:
    return [a for a in arrays if a is not None]


def _worst(a: Array) -> str:
    """Returns "nan", "inf" or "-inf" where the array holds one; else ""."""
    if not is_float(a.dtype) or not a.size:
        return ""
    xp = backend_of(a).xp
    wide = a if a.dtype.itemsize >= 4 else a.astype("float32")
    if bool(xp.isfinite(wide).all()):
        return ""
    return "nan" if bool(xp.isnan(wide).any()) else "inf" if bool((wide == float("inf")).any()) else "-inf"


def _norm(a: Array) -> float:
    if not is_float(a.dtype):
        return 0.0
    wide = a.astype(float64)
    return float((wide * wide).sum() ** 0.5)


def _shown(arrays: Sequence[Array]) -> str:
    return ", ".join(f"{tuple(a.shape)} {a.dtype.name}" for a in arrays) or "nothing"


def _told(row: TraceRow) -> str:
    grads = " ".join(f"{s} |{n:.3g}|" for s, n in zip(row.grads, row.grad_norms, strict=True))
    sent = " ".join(f"{s} |{n:.3g}|" for s, n in zip(row.sent, row.sent_norms, strict=True))
    return f"{row.op:<28}{grads:<30}{sent:<44}{row.ms:>8.3f}  {row.line}"
