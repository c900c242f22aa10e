"""The seam where a whole step becomes one device program."""

from __future__ import annotations

from collections.abc import Callable

from .backend import get_backend


def capture(fn: Callable[[], None], device: str) -> Callable[[], None]:
    """`fn` as something to call again and again.

    `fn` must be device work alone: static shapes, its inputs and outputs in buffers whose addresses do not
    change, nothing read back to the host. On the CPU it is returned unchanged.
    """
    return get_backend(device).capture(fn)
