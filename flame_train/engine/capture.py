"""Capture: a whole step recorded once as a CUDA graph, and then replayed."""

from __future__ import annotations

from collections.abc import Callable

from .backend import get_backend


def capture(fn: Callable[[], None], device: str) -> Callable[[], None]:
    """`fn` as a function to call again and again; on "cpu" `fn` itself.

    On "cuda" the first call runs `fn`, the second records it as a CUDA graph, and that and every later call replay it.

    `fn` must be device work alone: static shapes, its inputs and outputs in buffers whose addresses do not
    change, nothing read back to the host.

    Raises `EnvironmentFault` where "cuda" cannot be used, `ValueError` for another device. And, when called, what `fn`
    does, such as `RuntimeError` for a read back to the host.
    """
    return get_backend(device).capture(fn)
