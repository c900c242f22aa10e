"""What functions of an op are given, by the names of their parameters: references, formulas, kernels and guards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

Kind = Literal["tensor", "list", "attr"]
When = Callable[..., "bool | str"]

_KINDS: dict[str, Kind] = {
    "Array": "tensor",
    "Array | None": "tensor",
    "Array | float": "tensor",
    "Array | float | None": "tensor",
    "Sequence[Array]": "list",
}


class Arguments:
    """Base of dataclasses whose fields are values of an op that travel together.

    A function with a parameter of such a class reads the values that its fields name.
    """

    __slots__ = ()


def named(fn: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Returns `fn` with a signature of `names`, from which the registry reads what to pass it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(fn)["__signature__"] = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return fn


def names_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's parameters. An import asks for a thousand, and inspect takes long for each."""
    if not isinstance(fn, FunctionType) or vars(fn):  # a method, a partial, or one with a signature of its own
        return tuple(inspect.signature(fn).parameters)
    return fn.__code__.co_varnames[: fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount]


def spread(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the fields of its `Arguments` as parameters of their own; `fn` itself if it takes none."""
    parameters = names_of(fn)
    said = getattr(fn, "__annotations__", {})
    bundles = {n: cls for n in parameters if (cls := _bundle(fn, said.get(n)))}
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
    """Returns the subclass of `Arguments` that an annotation, as its module spells it, stands for, if any."""
    found = getattr(fn, "__globals__", {}).get(annotation)
    return found if isinstance(found, type) and issubclass(found, Arguments) else None


class Guard:
    """What a kernel demands of its inputs: conditions over some of the op's arguments each, checked in turn."""

    __slots__ = ("_conditions", "names")

    def __init__(self, *asks: When) -> None:
        self._conditions = [(ask, names_of(ask)) for ask in map(spread, asks)]
        self.names = frozenset(n for _, names in self._conditions for n in names)

    def rejection(self, arrays: Mapping[str, Any]) -> str:
        """Says why the kernel cannot take `arrays`, the op's arguments by name; "" if it can."""
        for condition, names in self._conditions:
            verdict = condition(*[arrays[n] for n in names])
            reason = verdict if isinstance(verdict, str) else "" if verdict else "declined by its condition"
            if reason:
                return reason
        return ""


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of an op's reference.

    `named` ones are keyword-only. `also` holds the alternatives of the annotation, such as "float" and "None".
    """

    name: str
    kind: Kind
    default: Any
    named: bool
    also: frozenset[str]


def parameters_of(fn: Callable[..., Any], skip_first: bool) -> tuple[Argument, ...]:
    """Returns the parameters of a reference or a body, without the first if `skip_first`."""
    found = list(inspect.signature(fn).parameters.values())[1 if skip_first else 0 :]
    return tuple(
        Argument(
            p.name,
            _kind(text),
            p.default,
            p.kind is inspect.Parameter.KEYWORD_ONLY,
            frozenset(text.split(" | ")),
        )
        for p, text in ((p, _spelled(fn, p)) for p in found)
    )


def _spelled(fn: Callable[..., Any], p: inspect.Parameter) -> str:
    """Returns a parameter's annotation as text, postponed or not. Raises TypeError for none."""
    if p.annotation is p.empty:
        raise TypeError(
            f"op {fn.__name__}: argument {p.name!r} has no annotation, which says whether it is a tensor: "
            f"write {p.name}: Array, or its type, such as int"
        )
    if isinstance(p.annotation, str):
        return p.annotation.replace("flame.", "")
    parts = get_args(p.annotation) if isinstance(p.annotation, UnionType) or get_origin(p.annotation) is Union else None
    return " | ".join(map(_type_name, parts)) if parts else _type_name(p.annotation)


def _type_name(kind: Any) -> str:
    """Returns `Array`, which is Any while the program runs, and the names of other types."""
    if kind is Any:
        return "Array"
    if get_args(kind):
        return f"{get_origin(kind).__name__}[{', '.join(map(_type_name, get_args(kind)))}]"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _kind(annotation: str) -> Kind:
    normal = annotation.replace("Tensor", "Array")
    return _KINDS.get(normal, "attr")


def public_signature(fn: Callable[..., Any], skip_first: bool) -> inspect.Signature:
    """Returns the signature that users see, without the first parameter if `skip_first`."""
    signature = inspect.signature(fn)
    return signature.replace(parameters=list(signature.parameters.values())[1 if skip_first else 0 :])
