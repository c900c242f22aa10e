"""Vocabularies that ComfyUI's files of text encoders hold as a tensor, the bytes of the published file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from flame_train.errors import ModelFileError
from flame_train.io.weights import open_weights

MAX_BYTES: Final = 100_000_000
"""Of a vocabulary's file."""


def stored_vocabulary(encoder: Path, tensor: str, what: str) -> bytes | None:
    """Returns the bytes that the encoder's file holds; None for one without, and where there is no file.

    Raises ModelFileError for a tensor of that name that is no bytes, or too many; `what` names the published file.
    """
    if not encoder.exists():
        return None
    with open_weights(encoder) as weights:
        name = next((name for name in weights.names if name.replace("/", ".").rpartition(".")[2] == tensor), None)
        if name is None:
            return None
        info = weights.info(name)
        if info.dtype != "U8" or info.nbytes > MAX_BYTES:
            raise ModelFileError(
                f"{encoder}: {name}: expected at most {MAX_BYTES} bytes (U8) of {what}, found "
                f"{info.nbytes} of {info.dtype}; get another copy"
            )
        return np.ascontiguousarray(weights.read(name)).tobytes()
