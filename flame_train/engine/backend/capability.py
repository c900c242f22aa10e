"""What a GPU's compute capability allows: 7.5 and newer compute here, 8.0 and newer in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...errors import EnvironmentFault
from ..dtype import DType, as_dtype, bfloat16

OLDEST: Final = (7, 5)
"""Turing, such as T4 and RTX 20xx: the oldest that CUDA 13 compiles for."""
OLDEST_WITH_BF16: Final = (8, 0)


def refuse_too_old(card: str, capability: tuple[int, int]) -> None:
    """Raises EnvironmentFault for a GPU older than any that is supported, with its name."""
    if capability < OLDEST:
        raise EnvironmentFault(
            f"{card} has compute capability {_dotted(capability)}; expected {_dotted(OLDEST)} or newer (Turing): use "
            "another GPU, or --device cpu"
        )


def refuse_formats(card: str, capability: tuple[int, int], formats: Mapping[str, DType | str]) -> None:
    """Raises EnvironmentFault where a GPU lacks a number format that is requested, with its name and the keys.

    `formats`: the format by the key or option that requests it. "auto" and other words request none.
    """
    if capability >= OLDEST_WITH_BF16:
        return
    lacking = [key for key, dtype in formats.items() if _is_bf16(dtype)]
    if lacking:
        raise EnvironmentFault(
            f'{", ".join(lacking)}: expected "fp16" or "fp32" on {card}, whose compute capability is '
            f'{_dotted(capability)}, got "bf16", which needs {_dotted(OLDEST_WITH_BF16)} or newer (Ampere)'
        )


def _is_bf16(dtype: DType | str) -> bool:
    return dtype == "bf16" if isinstance(dtype, str) else as_dtype(dtype) == bfloat16


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
