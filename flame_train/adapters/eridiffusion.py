"""What EriDiffusion's SDXL LoRA files say apart from their tensors: bare native names, and alpha in the metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

RANK_KEY: Final = "rank"
ALPHA_KEY: Final = "alpha"

BLOCK: Final = re.compile(r"\w+\.\d+")
"""The block that a bare native name begins with: `input_blocks.1`."""

_ITS_NAMES: Final = re.compile(r"(input_blocks|middle_block|output_blocks)\.")


def has_its_names(names: Iterable[str]) -> bool:
    """Whether all names are those of SDXL's native UNet without a prefix."""
    return all(_ITS_NAMES.match(name) for name in names)


def written_scale(metadata: Mapping[str, str], rank: int, key: str = ALPHA_KEY) -> float | None:
    """alpha / rank for a module of `rank`, by the metadata's `key`; None where it has none.

    Raises:
        ValueError: the alpha is no positive number, or the metadata's rank is not `rank`.
    """
    if key not in metadata:
        return None
    alpha = _number(metadata[key])
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"its metadata has {key} {metadata[key]!r}; expected a positive number")
    if RANK_KEY in metadata and _number(metadata[RANK_KEY]) != rank:
        raise ValueError(
            f"its metadata has rank {metadata[RANK_KEY]!r}, but its matrices have rank {rank}, so alpha / rank is not "
            "known; correct the metadata"
        )
    return alpha / rank


def _number(text: str) -> float:
    """NaN for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
