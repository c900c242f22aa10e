"""GPUs by what the CUDA backend asks of them, so that a step can be run for one that is not there."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """`capability` as in "90"; `shared_bytes` is the most shared memory that one block may have, `memory` in bytes.

    `name` is that of a card that is there; one that is only described has none.
    """

    capability: str
    multiprocessors: int
    shared_bytes: int
    memory: int = 80 << 30
    name: str = ""


H100 = Gpu("90", 132, 227 << 10)
"""An H100, and an H200 but for its memory."""

RTX_3090 = Gpu("86", 82, 99 << 10, 24 << 30)
T4 = Gpu("75", 40, 64 << 10, 16 << 30)
