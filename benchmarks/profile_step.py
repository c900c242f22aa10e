"""Where a captured step's time goes: GPU time by kind of kernel, and the longest kernels.

    python -m benchmarks.profile_step [--model NAME] [--batch N] [--checkpointing WHAT] [--quantize fp8] [--top K]

Needs a GPU and the parity extra: PyTorch's profiler reads the card's activity records, which include our kernels.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from flame_train.engine.mode import deterministic
from flame_train.tools import bench
from flame_train.tools.bench.models import names
from flame_train.tools.bench.timing import kind_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sdxl", choices=names())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--checkpointing", default="off", choices=["off", "mlp", "full", "offload"])
    parser.add_argument("--quantize", default="off", choices=["off", "fp8", "int8", "nf4"])
    parser.add_argument("--arithmetic", default="bf16", choices=["bf16", "fp8", "int8"])
    parser.add_argument("--not-deterministic", action="store_true")
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    with deterministic(not args.not_deterministic):
        case = bench.BenchCase(
            args.model,
            batch=args.batch,
            checkpointing=args.checkpointing,
            quantize=args.quantize,
            arithmetic=args.arithmetic,
        )
        step = bench.prepare(case).captured()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    repeats = 3
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in p.events():
        by_name[event.name][0] += event.device_time_total / 1e3 / repeats
        by_name[event.name][1] += 1 / repeats
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (ms, count) in by_name.items():
        kind = kind_of(name) or "the rest"
        by_kind[kind][0] += ms
        by_kind[kind][1] += count
    total = sum(ms for ms, _ in by_kind.values())
    print(f"{total:.2f} ms of GPU time a step")
    for kind, (ms, count) in sorted(by_kind.items(), key=lambda kv: -kv[1][0]):
        print(f"{ms:8.2f} ms {count:7.0f} x  {kind}")
    print()
    for name, (ms, count) in sorted(by_name.items(), key=lambda kv: -kv[1][0])[: args.top]:
        print(f"{ms:8.3f} ms {count:6.0f} x {ms / count * 1e3:8.1f} us  {name[:110]}")


if __name__ == "__main__":
    main()
