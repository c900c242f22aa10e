"""The seam where a whole step becomes one device program."""

from __future__ import annotations

from collections.abc import Callable

from .backend import get_backend
from .backend.cuda.capture import Captured


def capture(fn: Callable[[], None], device: str) -> Callable[[], None]:
    """`fn` as something to call again and again.

    `fn` must be device work alone: static shapes, its inputs and outputs in buffers whose addresses do not
    change, nothing read back to the host. On the CPU it is returned unchanged.
    """
    return get_backend(device).capture(fn)


def kernel_times(captured: Callable[[], None], kind_of: Callable[[str], str]) -> dict[str, tuple[int, float]]:
    """(launches, milliseconds) by kind of kernel of what `capture` returned for a GPU, after it has replayed.

    `kind_of` tells a kind from a kernel's name; see `Captured.times`. Raises `ValueError` for what is no graph.
    """
    if not isinstance(captured, Captured):
        raise ValueError("kernel_times: expected what capture returns on a GPU; on the CPU there are no kernels")
    return captured.times(kind_of)
