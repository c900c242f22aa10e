"""What a reference or a kernel returned, held to what its op declares."""

from __future__ import annotations

from typing import Any

from ..errors import kind_of
from .dtype import Array, as_array
from .op import Op


def split_results(op: Op, result: Any) -> tuple[list[Array], dict[str, Array]]:
    """The outputs as a list, and the `aux` values by name. Raises TypeError for what the op does not declare."""
    if isinstance(result, (tuple, list)) != (op.multiple or bool(op.aux)):
        raise _misdeclared(op, result)
    head, aux = (result[0], result[1:]) if op.aux else (result, ())
    outputs = [as_array(o) for o in (head if op.multiple else (head,))]
    if len(aux) != len(op.aux) or not all(hasattr(o, "dtype") for o in outputs):
        raise _misdeclared(op, result)
    return outputs, dict(zip(op.aux, aux, strict=True))


def _misdeclared(op: Op, result: Any) -> TypeError:
    came = kind_of(result)
    if isinstance(result, (tuple, list)):
        came = f"a {came} of {', '.join(map(kind_of, result)) or 'nothing'}"
    if op.aux:
        wanted = f"a tuple of the result{'s' * op.multiple} and of {', '.join(op.aux)}, as aux says"
    elif op.multiple:
        wanted = "a tuple of arrays, as multiple=True says"
    else:
        wanted = "an array; declare several results by multiple=True, values for the gradient by aux=(their names,)"
    return TypeError(f"{op.name}: its function returned {came}; expected {wanted}")
