"""The benchmark: `bench step`, `bench memory` and `bench ops`, and what they are compared with."""

from __future__ import annotations

from .lora_step import (
    BenchCase,
    Predicted,
    Prepared,
    check_counterpart,
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
    "gib",
    "peak_gib",
    "predicted",
    "prepare",
    "random_batch",
    "randomise",
    "step",
    "torch_step",
]
