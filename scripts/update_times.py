"""The time of each optimizer's update of SDXL's LoRA of rank 16, captured, beside PyTorch's AdamW on the same card.

    python scripts/update_times.py [--rank N] [--targets NAME] [--only PATTERN]

By default 560 pairs of matrices, 23 M values; with `--targets attention+mlp` 700. A working copy in bf16, gradients
clipped by their norm. The floor is what must be read and written once, at the rate of this card's best copy: gradients,
values, working copy and state. Needs a GPU and, for the last rows, the parity extra.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from flame_train.adapters.targets import resolve
from flame_train.config.load import from_options
from flame_train.engine import Parameter, capture, nn
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.optim import Optimizer
from flame_train.optimizers import OPTIMIZERS
from flame_train.tools.bench.models import find
from flame_train.training.optimizer import build_optimizer

REPEATS, ROUNDS = 20, 7
READ_ONLY = ("p0", "signed", "unsigned", "places")
"""Entries of states that no update writes."""


def shapes(rank: int, targets: str) -> list[tuple[int, int]]:
    """Down and up of each layer that SDXL's LoRA adapts, by default those that `bench` measures."""
    family, model = find("sdxl")
    parts = dict(model.network.named_modules())
    found: list[tuple[int, int]] = []
    for name in resolve(model.network, (targets or family.bench_targets,), model.presets):
        layer = parts[name]
        assert isinstance(layer, nn.Linear), name
        found += [(rank, layer.in_features), (layer.out_features, rank)]
    return found


def made(name: str, sizes: list[tuple[int, int]], backend: Backend) -> Optimizer:
    """The optimizer as a run of bf16 has it, with gradients in place."""
    rng = np.random.default_rng(0)
    parameters = [Parameter(rng.standard_normal(s).astype(np.float32) * 0.02, f"p{i}") for i, s in enumerate(sizes)]
    config = from_options(
        train={"precision": "bf16", "steps": 1000},
        optimizer={"name": name, "lr": 1.0 if OPTIMIZERS[name]().lr_is_factor else 1e-4},
        schedule={"name": "constant"},
    )
    optimizer = build_optimizer(parameters, config.train, config.optimizer, config.schedule, config.gradient, backend)
    xp = backend.xp
    optimizer.arena.grads[...] = xp.sin(xp.arange(optimizer.arena.size, dtype=np.float32)) * np.float32(1e-3)
    for start, stop in optimizer.arena.padding:
        optimizer.arena.grads[start:stop] = 0.0
    return optimizer


def milliseconds(call: Callable[[], None], backend: Backend) -> float:
    """Of one call, many being one captured graph: the median of some rounds."""

    def many() -> None:
        for _ in range(REPEATS):
            call()

    graph = capture(many, "cuda")
    graph()
    graph()
    times = []
    for _ in range(ROUNDS):
        backend.synchronize()
        begin = time.perf_counter()
        graph()
        backend.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / REPEATS * 1e3


def copy_rate(backend: Backend) -> float:
    """Bytes a second that this card reads and writes in a copy of 1 GiB."""
    xp = backend.xp
    source, target = xp.ones(1 << 28, np.float32), xp.empty(1 << 28, np.float32)

    def copy() -> None:
        target[...] = source

    return 2 * source.nbytes / (milliseconds(copy, backend) * 1e-3)


def floor_bytes(o: Optimizer) -> int:
    """What an update must read and write at least."""
    state = o._transforms[-1]
    moved = sum(int(a.nbytes) * (1 if n in READ_ONLY else 2) for n, a in state.items())
    low = 0 if o.arena.compute_values is None else int(o.arena.compute_values.nbytes)
    return int(o.arena.grads.nbytes) + 2 * int(o.arena.values.nbytes) + low + moved


def launches(o: Optimizer) -> list[str]:
    """The names of an update's kernels; other operations of CuPy's are not seen."""
    told: list[str] = []
    with o.arena.backend.kernels.launch_hooks.hooked(lambda name, _: told.append(name) or True):
        o.step()
    return told


def counted(names: list[str]) -> str:
    """Each name once, where it comes first, with how often it comes: "product x 3"."""
    return ", ".join(name if n == 1 else f"{name} x {n}" for name, n in Counter(names).items())


def torch_rows(sizes: list[tuple[int, int]]) -> list[tuple[str, float]]:
    """PyTorch's AdamW, fused and foreach, and with the norm clipped, each a captured graph."""
    import torch

    rows = []
    for label, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        for clipped in (False, True):
            parameters = [torch.nn.Parameter(torch.randn(s, device="cuda") * 0.02) for s in sizes]
            for p in parameters:
                p.grad = torch.randn_like(p) * 1e-3
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, capturable=True, **options)

            def step(parameters: Any = parameters, optimizer: Any = optimizer, clipped: bool = clipped) -> None:
                if clipped:
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
                optimizer.step()

            rows.append((f"torch AdamW, {label}{', norm clipped' if clipped else ''}", _torch_ms(step)))
    return rows


def _torch_ms(step: Callable[[], None]) -> float:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            step()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / REPEATS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="", help="as lora.targets")
    parser.add_argument("--only", default="*", help="a glob over the optimizers' names")
    args = parser.parse_args()
    backend, sizes = get_backend("cuda"), shapes(args.rank, args.targets)
    rate = copy_rate(backend)
    count = sum(a * b for a, b in sizes)
    print(f"{len(sizes) // 2} layers, {count / 1e6:.1f} M values; a copy runs at {rate / 1e12:.2f} TB/s")
    print("| optimizer | ms | floor, ms | share of the floor | state, MB | kernels |", "|---" * 6 + "|", sep="\n")
    for name in fnmatch.filter(OPTIMIZERS, args.only):
        o = made(name, sizes, backend)
        kernels = launches(o)
        ms, floor = milliseconds(o.step, backend), floor_bytes(o) / rate * 1e3
        state = sum(int(a.nbytes) for a in o._transforms[-1].values()) / 1e6
        print(f"| {name} | {ms:.3f} | {floor:.3f} | {floor / ms:.0%} | {state:.0f} | {counted(kernels)} |", flush=True)
        del o
        backend.empty_cache()
    if importlib.util.find_spec("torch") is not None:
        for label, ms in torch_rows(sizes):
            print(f"| {label} | {ms:.3f} | | | | |", flush=True)


if __name__ == "__main__":
    main()
