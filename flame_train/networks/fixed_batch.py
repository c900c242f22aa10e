"""Batches of one fixed size, so that what is computed of an item does not depend on the items beside it.

A network that encodes items one by one leaves a GPU idle. In batches of any size its products would go through other
kernels, with sums in another order. So all batches of a shape have one size, and copies of the last item fill a batch
up. Each item then goes through the same kernels at the same sizes, whichever items share its batch. On a GPU a row of a
product is computed from its own operands alone, in one order. So are a head of attention and an image of a convolution.
OpenBLAS promises no such thing: its kernels for Haswell and Zen round a row by its place. So a CPU takes single items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flame_train.engine import Tensor, capture
from flame_train.engine.backend import Backend, Upload, get_backend
from flame_train.engine.dtype import DType

HostArrays = dict[str, np.ndarray[Any, Any]]
"""The arrays of one item by name, without a batch dimension."""

Function = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""What is computed of a batch: device work alone, of static shapes."""

Layout = Mapping[str, tuple[tuple[int, ...], DType]]
"""Shape, without a batch dimension, and dtype of each array."""


class FixedBatches:
    """`fn` on batches, captured for each shape of its inputs unless it is not `captured`.

    `results` says what `fn` returns for an item with these inputs. `size` says how many such items are a batch on an
    asynchronous device. A CPU takes them one by one, so that an item's bytes do not depend on others there, either.
    """

    def __init__(
        self,
        fn: Function,
        results: Callable[[HostArrays], Layout],
        size: Callable[[HostArrays], int],
        device: str,
        captured: bool = True,
    ) -> None:
        self._fn, self._results, self._backend, self._captured = fn, results, get_backend(device), captured
        self._size = size if self._backend.asynchronous else lambda _: 1
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._uploader = self._backend.uploader()

    def start(self, items: Sequence[HostArrays]) -> Callable[[], list[HostArrays]]:
        """Starts on items of one shape, at most as many as a batch has; calling the result waits for their arrays."""
        size = self._size(items[0])
        if len(items) > size:
            raise ValueError(f"expected at most {size} items, got {len(items)}")
        padded = [*items, *[items[-1]] * (size - len(items))]
        host = {name: np.stack([item[name] for item in padded]) for name in items[0]}
        kind = tuple((name, a.shape, a.dtype) for name, a in host.items())
        if kind not in self._programs:
            self._programs[kind] = _Program(self._fn, host, self._results(items[0]), self._backend, self._captured)
        found = self._programs[kind].start(self._uploader.submit(host))

        def wait() -> list[HostArrays]:
            arrays = {name: get() for name, get in found.items()}
            return [{name: a[i] for name, a in arrays.items()} for i in range(len(items))]

        return wait


class _Program:
    """`fn` for one shape with its buffers; its graph does not know it, so that it is gone when nobody needs it."""

    def __init__(self, fn: Function, like: HostArrays, results: Layout, backend: Backend, captured: bool) -> None:
        size = len(next(iter(like.values())))
        self._backend = backend
        self._inputs = inputs = {name: backend.empty(a.shape, a.dtype) for name, a in like.items()}
        self._outputs = outputs = {name: backend.empty((size, *shape), kind) for name, (shape, kind) in results.items()}

        def compute() -> None:
            made = fn({name: Tensor(a) for name, a in inputs.items()})
            for name, out in outputs.items():
                found = made[name]
                if (found.shape, found.dtype) != (out.shape, out.dtype):
                    raise ValueError(f"{name}: expected {out.shape} {out.dtype}, got {found.shape} {found.dtype}")
                out[...] = found.data

        self._run = capture(compute, backend.name) if captured else compute

    def start(self, sent: Upload) -> dict[str, Callable[[], np.ndarray[Any, Any]]]:
        """Queues the work; each function gives a result, once that is there."""
        for name, array in sent.wait().items():
            self._inputs[name][...] = array
        sent.release()
        self._run()
        return {name: self._backend.get_async(out) for name, out in self._outputs.items()}
