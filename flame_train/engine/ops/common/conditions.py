"""What kernels demand of their operands. Each function returns why a kernel cannot take them, "" if it can."""

from __future__ import annotations

from typing import Any

from ...dtype import Array, DType, bfloat16, bool_, float16, float32, float64

LOW = frozenset({float16, bfloat16})
AT_MOST_FP32 = frozenset({float32, float16, bfloat16})
GENERATED = AT_MOST_FP32 | {bool_}
ANY_FLOAT = frozenset({float64, float32, float16, bfloat16})


def same(allowed: frozenset[DType], *arrays: Array | None) -> str:
    """Demands that all operands have one dtype, and one of `allowed`."""
    found = {a.dtype for a in arrays if a is not None}
    if len(found) != 1:
        return f"operands of several dtypes: {', '.join(sorted(d.name for d in found))}"
    return "" if found <= allowed else f"no kernel for {found.pop().name}"


def packets(width: int, limit: int) -> str:
    """Demands that a row of `width` elements consists of whole packets of eight, and is no longer than `limit`."""
    if width % 8 or width == 0:
        return f"rows of {width} are no multiple of 8"
    return "" if width <= limit else f"rows of {width} are longer than {limit}"


def floating(*operands: Any) -> str:
    """Demands dtypes that generated kernels know, at least one of them floating. Python numbers always fit."""
    dtypes = [a.dtype for a in operands if hasattr(a, "dtype")]
    for d in dtypes:
        if d not in GENERATED:
            return f"no kernel for {d.name}"
    return "" if any(d != bool_ for d in dtypes) else "no floating operand"
