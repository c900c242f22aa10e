"""Calls of ops made ready while others are timed: values drawn, arithmetic counted, kernels compiling."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from benchmarks.flops import Counted, counted
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import DType
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import Op, Sample
from flame_train.engine.op_samples import materialise
from flame_train.engine.shape_run import compile_ahead, gpu_of

FROZEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "linear_add", "conv2d", "lora_linear", "lora_conv2d"), ("weight", "bias")),
    "lora_linears": ("weights",),
    "feed_forward": ("weight1", "bias1", "weight2", "bias2"),
    **dict.fromkeys(("scaled_linear", "scaled_lora_linears", "scaled_feed_forward"), ("bias", "bias1", "bias2")),
}
"""The base weights, which a LoRA step does not differentiate, by op."""
_THREADS, _AHEAD = 6, 16  # calls that are ready or being made so: at most 2 GiB each on the host


@dataclass(frozen=True, slots=True)
class Ready:
    """A call: its arguments on the host, those whose gradients are timed, and what it computes."""

    op: Op
    host: Mapping[str, Any]
    wanted: tuple[str, ...]
    counted: Counted


def wanted_of(op: Op) -> tuple[str, ...]:
    """Returns the arguments whose gradients are timed."""
    return tuple(n for n in op.differentiable if n not in FROZEN.get(op.name, ()))


def ready(op: Op, s: Sample, backend: Backend, dtype: DType) -> Ready:
    """Returns one call with drawn values in `dtype`; on a GPU its kernels are compiled from now on, on threads."""
    host = materialise(op, s, generator(op.name, 0), dtype)
    wanted = wanted_of(op)
    found = counted(op, host, wanted, gpu_of(backend.name))
    if backend.kernels is not None:
        compile_ahead(found.kernels)
    return Ready(op, host, wanted, found)


def all_ready(calls: Iterable[tuple[Op, Sample]], backend: Backend, dtype: DType) -> Iterator[Ready]:
    """Yields the calls in their order; on a GPU, which works by itself, some are made ready ahead."""
    if not backend.asynchronous:
        yield from (ready(op, s, backend, dtype) for op, s in calls)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting = deque[Future[Ready]]()
        try:
            for op, s in calls:
                waiting.append(pool.submit(copy_context().run, ready, op, s, backend, dtype))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
