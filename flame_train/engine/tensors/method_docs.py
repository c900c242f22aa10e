"""Docstrings of a Tensor's methods: what the op of the same name says of itself."""

from __future__ import annotations

import inspect

from ..op import REGISTRY, Op
from .inplace import InPlace
from .methods import Methods


def described(op: Op) -> str:
    """The op's docstring, and a line for each of its arguments after the first with its default."""
    rows = [f"    {p.name}{_default(p.default)}{' (by name)' if p.named else ''}" for p in op.params[1:]]
    text = inspect.cleandoc(op.fn.__doc__ or "")
    return "\n".join([text, "", "Arguments:", *rows]) if rows else text


def _default(value: object) -> str:
    return "" if value is inspect.Parameter.empty else f" = {value!r}"


def document() -> None:
    """Gives every method that has no docstring that of its op; one that writes in place says so."""
    for kind in (Methods, InPlace):
        for name, method in vars(kind).items():
            op = REGISTRY.get(name.removesuffix("_"))
            if not inspect.isfunction(method) or name.startswith("_") or method.__doc__ or op is None:
                continue
            place = " Written into this tensor." if name.endswith("_") else ""
            method.__doc__ = f"{described(op)}\n\nAs functional.{op.name}.{place}"
