"""Functions that name what they read: a formula's, kernel's or guard's parameters are an op's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import chain
from typing import Any


class Arguments:
    """Base of dataclasses whose fields are values of an op that travel together.

    A function with a parameter of such a class reads the values that its fields name.
    """

    __slots__ = ()


def named(fn: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """`fn` with a signature of `names`, from which the registry reads what to pass it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(fn)["__signature__"] = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return fn


def spread(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the fields of its `Arguments` as parameters of their own; `fn` itself if it takes none."""
    parameters = inspect.signature(fn).parameters
    bundles = {n: cls for n, p in parameters.items() if (cls := _bundle(fn, p.annotation))}
    if not bundles:
        return fn
    reads = {n: tuple(f.name for f in fields(bundles[n])) if n in bundles else (n,) for n in parameters}
    names = tuple(dict.fromkeys(chain(*reads.values())))

    def call(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(names, args, strict=False)) | kwargs
        given = ((bundles.get(n), [values[name] for name in read]) for n, read in reads.items())
        return fn(*[items[0] if cls is None else cls(*items) for cls, items in given])

    return named(call, names)


def _bundle(fn: Callable[..., Any], annotation: Any) -> Any:
    """The subclass of `Arguments` that an annotation, as its module spells it, stands for, if it does for one."""
    found = getattr(fn, "__globals__", {}).get(annotation)
    return found if isinstance(found, type) and issubclass(found, Arguments) else None
