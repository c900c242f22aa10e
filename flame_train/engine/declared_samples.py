"""What an op is tried on: its samples as they are declared, and when those are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs to try an op on, positional and by name; tensors are written as shapes or as `Values`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ErrorSample:
    """Inputs an op must refuse, the error's type and a regular expression its message must match."""

    sample: Sample
    error: type[Exception]
    match: str


def sample(*args: Any, **kwargs: Any) -> Sample:
    """Returns `sample((2, 3), (3,), eps=1e-5)`: a tensor is written as its shape or as `Values`."""
    return Sample(args, kwargs)


S = TypeVar("S", Sample, ErrorSample)
DeclaredSample: TypeAlias = Sample | Callable[[], Iterable[Sample]]
DeclaredError: TypeAlias = ErrorSample | Callable[[], Iterable[ErrorSample]]
"""A sample, or a function that makes some: arrays of numbers are made when they are asked for, not at each import."""


def made(given: Iterable[S | Callable[[], Iterable[S]]]) -> Iterator[S]:
    """Yields the declared samples, those of functions made now."""
    for one in given:
        if callable(one):
            yield from one()
        else:
            yield one
