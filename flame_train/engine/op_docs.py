"""What `help` shows of an op and of a Tensor's methods: the formula, how it is called, its arguments, an example.

The example is the first of the op's samples. It runs when somebody asks for help.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np

from .op import REGISTRY, Op
from .op_samples import Values
from .tensors.inplace import InPlace
from .tensors.methods import Methods

_FEW = 8  # values that an example spells out


class _Help:
    """In place of `Op.__doc__`: an op's help, and of the class its own docstring."""

    def __init__(self, of_class: str | None) -> None:
        self._of_class = of_class

    def __get__(self, op: Op | None, owner: type[Op]) -> str | None:
        return self._of_class if op is None else help_of(op)

    def __set__(self, op: Op, value: str | None) -> None:
        """An op's own text is its function's."""


def install() -> None:
    """Makes `help(op)` show `help_of(op)`, and gives the methods of a Tensor the docstrings of their ops."""
    Op.__doc__ = _Help(Op.__doc__)  # type: ignore[assignment]
    for kind in (Methods, InPlace):
        for name, method in vars(kind).items():
            op = name.removesuffix("_")
            if inspect.isfunction(method) and not name.startswith("_") and not method.__doc__:
                place = " Written into this tensor." if name.endswith("_") else ""
                more = "" if op in REGISTRY else ", whose help says more"
                method.__doc__ = f"{_of_method(op)}As functional.{op}{more}.{place}"


def _of_method(name: str) -> str:
    """Returns the op's docstring and a line for each further argument; nothing of an op that is not loaded."""
    if name not in REGISTRY:
        return ""
    op = REGISTRY[name]
    rows = [
        f"    {p.name}{'' if p.default is inspect.Parameter.empty else f' = {p.default!r}'}{' (by name)' * p.named}"
        for p in op.params[1:]
    ]
    text = inspect.cleandoc(op.fn.__doc__ or "")
    return "\n".join([text, "", *(["Arguments:", *rows, ""] if rows else []), ""])


def help_of(op: Op) -> str:
    """Returns the op's docstring, how it is called, its arguments with their defaults, and an example."""
    text = inspect.cleandoc(op.fn.__doc__ or "")
    parts = [text, f"Call: {op.name}({', '.join(map(_parameter, op.params))})"]
    if "Args:" not in text:
        parts.append("Args:\n" + "\n".join(f"    {p.name}: {_kind(op, p.name)}{_default(p)}" for p in op.params))
    if REGISTRY.get(op.name) is op:
        parts.append(_example(op))
    return "\n\n".join(parts)


def _parameter(p: Any) -> str:
    return p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default!r}"


def _default(p: Any) -> str:
    named = ", by name only" if p.named else ""
    return named if p.default is inspect.Parameter.empty else f"{named}; {p.default!r} by default"


def _kind(op: Op, name: str) -> str:
    """Returns what is given for an argument: `a tensor`, `tensors in a list`, or the words of its annotation."""
    if name in op.list_names:
        return "tensors in a list"
    if name in op.tensor_names:
        kinds = ["a tensor", *(["a number"] if name in op.number_names else [])]
        return " or ".join([*kinds, *(["None"] if name in op.optional_names else [])])
    found = inspect.signature(op.fn).parameters[name].annotation
    return found if isinstance(found, str) else getattr(found, "__name__", str(found))


def _example(op: Op) -> str:
    """Returns the op's first sample as a call, and the shape of what that gives, or the shapes."""
    flame = sys.modules["flame_train.engine"]  # this module is part of what makes it
    given = next(iter(op.iter_samples()))
    arguments = [_written(v, n in op.tensor_names) for n, v in zip(_names(op, given.args), given.args, strict=True)]
    arguments += [f"{n}={_written(v, n in op.tensor_names)}" for n, v in given.kwargs.items() if n != "rng"]
    arguments += ["training=False"] if "rng" in given.kwargs else []  # without random numbers of one's own
    call = f"flame.functional.{op.name}({', '.join(arguments)})"
    made = eval(call, {"flame": flame})
    shown = f"{call}.shape" if hasattr(made, "shape") else f"[x.shape for x in {call}]"
    result = made.shape if hasattr(made, "shape") else [x.shape for x in made]
    return f"Example:\n    >>> import flame_train.engine as flame\n    >>> {shown}\n    {result}"


def _names(op: Op, args: tuple[Any, ...]) -> list[str]:
    """Returns the parameter that each positional argument is for; those beyond the last are of its list."""
    return [op.positional[min(i, len(op.positional) - 1)] for i in range(len(args))]


def _written(value: Any, is_tensor: bool) -> str:
    """Returns a sample's argument as a user would write it; a tensor's is its shape, its values, or a list of these."""
    if isinstance(value, list) and is_tensor:
        return f"[{', '.join(_written(v, True) for v in value)}]"
    if isinstance(value, Values) or (isinstance(value, tuple) and is_tensor):
        return _drawn(value if isinstance(value, Values) else Values(value))
    if isinstance(value, np.ndarray):
        kind = "" if value.dtype.kind in "fb" or value.dtype == np.int64 else f', dtype="{value.dtype}"'
        sizes = ", ".join(map(str, value.shape))
        return f"flame.tensor({value.tolist()}{kind})" if value.size <= _FEW else f"flame.zeros({sizes}{kind})"
    return repr(str(value)) if isinstance(value, np.dtype) else repr(value)


def _drawn(values: Values) -> str:
    sizes = ", ".join(map(str, values.shape))
    if values.kind == "int":
        return f"flame.randint({int(values.low)}, {int(values.high)}, {values.shape})"
    if values.kind == "bool":
        return f"(flame.rand({sizes}) < 0.5)"
    return f"flame.rand({sizes})" if values.low >= 0 else f"flame.randn({sizes})"
