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


def no_copies(input: Array) -> str:
    """Demands a dtype whose values our kernels move without changing a bit."""
    return same(AT_MOST_FP32, input)


def packets(width: int, limit: int) -> str:
    """Demands that a row of `width` elements consists of whole packets of eight, and is no longer than `limit`."""
    if width % 8 or width == 0:
        return f"rows of {width} are no multiple of 8"
    return "" if width <= limit else f"rows of {width} are longer than {limit}"


def generated(*operands: Any) -> str:
    """Demands dtypes that generated kernels know: floats and truth values. Python numbers always fit."""
    unknown = [a.dtype.name for a in operands if hasattr(a, "dtype") and a.dtype not in GENERATED]
    return f"no kernel for {unknown[0]}" if unknown else ""


def floating(*operands: Any) -> str:
    """Answers as `generated`, and at least one operand must be floating."""
    dtypes = [a.dtype for a in operands if hasattr(a, "dtype")]
    return generated(*operands) or ("" if any(d != bool_ for d in dtypes) else "no floating operand")
