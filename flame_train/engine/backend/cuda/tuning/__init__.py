"""Thresholds by which kernels are chosen and cut, by architecture: a file each, measured on one of its GPUs.

To tune for another GPU, add `sm_89.py` beside `sm_90.py` and a line to `TUNINGS`.
"""

from __future__ import annotations

from ....dtype import Array
from .sm_90 import SM_90
from .thresholds import Tuning

__all__ = ["SM_90", "TUNINGS", "Tuning", "tuning_for", "tuning_of"]

TUNINGS = {90: SM_90}
"""By compute capability."""


def tuning_for(compute_capability: int) -> Tuning:
    """Returns the thresholds for an architecture; those measured on 9.0 where nobody has measured."""
    return TUNINGS.get(compute_capability, SM_90)


def tuning_of(x: Array) -> Tuning:
    """Returns the thresholds for the GPU that `x` lies on."""
    return tuning_for(int(x.device.compute_capability))
