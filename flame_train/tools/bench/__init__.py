"""The benchmark: `bench step` and `bench memory`. `benchmarks/`, in a checkout, has `bench ops` and PyTorch's steps."""

from __future__ import annotations

from .lora_step import (
    BenchCase,
    Predicted,
    Prepared,
    check_counterpart,
    from_checkout,
    gib,
    peak_gib,
    predicted,
    prepare,
    random_batch,
    randomise,
    step,
    torch_step,
)

__all__ = [
    "BenchCase",
    "Predicted",
    "Prepared",
    "check_counterpart",
    "from_checkout",
    "gib",
    "peak_gib",
    "predicted",
    "prepare",
    "random_batch",
    "randomise",
    "step",
    "torch_step",
]
