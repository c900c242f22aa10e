"""Runs the body of a composite op; its errors name the composite before the op inside that complained."""

from __future__ import annotations

from typing import Any

from ..errors import ShapeError
from .mode import Mode
from .op import Op


def run_body(op: Op, m: Mode, values: dict[str, Any]) -> Any:
    """Returns what the body makes of bound `values`. Hooks hear the composite's name: the ops inside report themselves.

    Raises ShapeError as "normalize, in norm: ...", and all else that the body raises.
    """
    for hook in m.hooks:
        hook.before(op.name, "body", [])
    try:
        return op.fn(**values)
    except ShapeError as e:
        raise named(op, e) from e.__cause__


def named(op: Op, error: ShapeError) -> ShapeError:
    """Returns the error of a composite: with its name before that of the op inside, if the error begins with one."""
    inner = str(error).partition(":")[0].partition(",")[0]
    if inner == op.name or not inner.isidentifier():
        return error
    return ShapeError(f"{op.name}, in {error}")
