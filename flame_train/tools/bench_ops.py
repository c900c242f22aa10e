"""`bench ops`: every op at the sizes that matter, against this machine's own measured ceilings."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np

from flame_train.engine import Tensor, capture, grad, no_grad
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.check import generator
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import DType, as_dtype, float32, is_float
from flame_train.engine.mode import deterministic
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.sample import materialise, tensor_arguments
from flame_train.errors import ConfigError, EnvironmentFault
from flame_train.tools import bench_sizes
from flame_train.tools.bench_flops import FROZEN, op_flops
from flame_train.tools.bench_torch import torch_seconds

_ROUNDS, _TARGET_S = 5, 0.02
_BEYOND_CACHE, _SETS = 1 << 28, 24  # bytes that no GPU's cache holds; copies of the arguments at most


@dataclass(frozen=True, slots=True)
class Row:
    """One op at one size. `rate` is in TFLOP/s where arithmetic counts, else TB/s; `share` is of the ceiling."""

    op: str
    phase: str
    shapes: str
    us: float
    rate: float
    unit: str
    share: float
    implementation: str
    declined: str
    torch_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's."""
        return None if self.torch_us is None else self.us / self.torch_us


def run(names: list[str], device: str, dtype: str, against: str | None, exact: bool = True) -> dict[str, Any]:
    """Times the named ops, or those of an SDXL step, or with the name "all" every op that has sizes of its own.

    Forward and backward, to all that can be differentiated but the base weights of a LoRA step. Inputs lie beyond the
    cache's reach. `exact` asks our kernels for the same bits every run; PyTorch runs by its defaults.

    Raises `ConfigError` for an unknown op, `EnvironmentFault` if `against` is "torch" and it is not importable.
    """
    _check_names(names)
    if against and importlib.util.find_spec(against) is None:
        raise EnvironmentFault(f"bench ops --against {against}: it is not installed; leave the option out")
    backend, low = get_backend(device), as_dtype(dtype)
    limits = ceilings(backend, low)
    with deterministic(exact):
        rows = [r for op, s in _chosen(names) for r in _rows(op, s, backend, low, limits, against)]
    flops, bandwidth = limits
    return {
        "device": device,
        "dtype": dtype,
        "deterministic": exact,
        "ceiling TFLOP/s": round(flops / 1e12, 3),
        "ceiling TB/s": round(bandwidth / 1e12, 4),
        "ops": [asdict(r) | {"ratio": r.ratio} for r in rows],
    }


def _chosen(names: list[str]) -> Iterator[tuple[Op, Sample]]:
    step, more = bench_sizes.STEP, bench_sizes.MORE
    every = sorted({*step, *more})
    for name in every if names == ["all"] else names or sorted(step):
        op = REGISTRY[name]
        sizes = more.get(name) or step.get(name) if names else step[name]
        for s in sizes or [*op.iter_large_samples()] or [*op.iter_samples()]:
            yield op, s


def _check_names(names: list[str]) -> None:
    unknown = [n for n in names if n not in REGISTRY and names != ["all"]]
    if unknown:
        near = get_close_matches(unknown[0], REGISTRY, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"bench ops: no op named {unknown[0]!r}{hint}")


def ceilings(backend: Backend, dtype: DType) -> tuple[float, float]:
    """This machine's own best: FLOP/s of a large matrix product, and bytes/s of reading and writing."""
    n, size = (8192, 1 << 30) if backend.name == "cuda" else (1024, 1 << 26)
    rng = np.random.default_rng(0)
    matrices = [Tensor(backend.put(rng.standard_normal((n, n), np.float32)).astype(dtype)) for _ in range(2)]
    source = Tensor(backend.empty((size // 4,), float32))
    source.fill_(1.0)

    def over_memory() -> None:
        F.neg(source)  # a kernel of ours: a copy in a captured graph is slower

    seconds = [_seconds([fn], backend) for fn in (lambda: F.matmul(*matrices), over_memory)]
    return 2.0 * n**3 / seconds[0], 2.0 * size / seconds[1]


def _rows(
    op: Op, s: Sample, backend: Backend, dtype: DType, limits: tuple[float, float], against: str | None
) -> Iterator[Row]:
    """The op's forward pass and, if there is one, its backward pass."""
    sets, wanted = _argument_sets(op, s, backend, dtype), _wanted(op)
    with no_grad():
        result = op(**sets[0])

    def row(phase: str, calls: list[Callable[[], Any]], work: float, moved: int) -> Row:
        seconds = _seconds(calls, backend)
        rate, unit, top = (work, "TFLOP/s", limits[0]) if work else (moved, "TB/s", limits[1])
        theirs = torch_seconds(op, sets, wanted, backend.name, phase) if against else None
        return _row(op, phase, sets[0], seconds, (rate / seconds, unit, top), theirs)

    def forward(bound: dict[str, Any]) -> Any:
        with no_grad():
            return op(**bound)

    there, back = op_flops(op.name, sets[0])
    yield row("forward", [partial(forward, bound) for bound in sets], there, _bytes(op, sets[0], result))
    if calls := [c for bound in sets if (c := _backward(op, bound, wanted))]:
        yield row("backward", [c for c, _ in calls], back, calls[0][1])


def _wanted(op: Op) -> tuple[str, ...]:
    """The arguments whose gradients are timed."""
    return tuple(n for n in op.differentiable if n not in FROZEN.get(op.name, ()))


def _argument_sets(op: Op, s: Sample, backend: Backend, dtype: DType) -> list[dict[str, Any]]:
    """The arguments, as many times as it takes for them to be gone from the cache when their turn comes again."""
    first = materialise(op, s, generator(op.name, 0), dtype, backend.name)
    size = sum(t.data.nbytes for _, _, t in tensor_arguments(op, first))
    count = min(_SETS, -(-_BEYOND_CACHE // max(size, 1))) if backend.name == "cuda" else 1

    def again(value: Any) -> Any:
        if isinstance(value, list):
            return [again(v) for v in value]
        return Tensor(value.data.copy()) if isinstance(value, Tensor) else value

    return [first, *({n: again(v) for n, v in first.items()} for _ in range(count - 1))]


def _backward(op: Op, bound: dict[str, Any], wanted: Sequence[str]) -> tuple[Callable[[], Any], int] | None:
    """The backward pass of one call as a function, and the bytes it must move; None if there is none to run."""
    leaves = [t for name, _, t in tensor_arguments(op, bound) if name in wanted and is_float(t.dtype)]
    for t in leaves:
        t.requires_grad_()
    out = op(**bound)
    if not isinstance(out, Tensor) or out._node is None:
        return None
    g = Tensor(out.data.copy())
    kept = {id(v): v.nbytes for v in out._node.kept if hasattr(v, "nbytes")}

    def run() -> Any:
        return grad([out], leaves, [g], retain_graph=True)

    made = [t.data for t in run()]
    if all(x is g.data for x in made):
        return None
    return run, g.data.nbytes + sum(kept.values()) + sum(
        x.nbytes for x in made if x is not g.data and 0 not in x.strides
    )


def _row(
    op: Op, phase: str, bound: dict[str, Any], seconds: float, rate: tuple[float, str, float], theirs: float | None
) -> Row:
    choices = explain(op, **bound)
    chosen = next(i for i, why in choices if why == "chosen")
    declined = "; ".join(f"{i}: {why}" for i, why in choices if i != chosen and "passed over" not in why)
    shapes = " ".join("x".join(map(str, t.shape)) for _, _, t in tensor_arguments(op, bound))
    return Row(
        op.name, phase, shapes, round(seconds * 1e6, 2), round(rate[0] / 1e12, 4), rate[1],
        round(rate[0] / rate[2], 4), chosen, declined, None if theirs is None else round(theirs * 1e6, 2),
    )  # fmt: skip


def _bytes(op: Op, bound: Mapping[str, Any], result: Any) -> int:
    """Each input read once, each output written once."""
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(t.data.nbytes for _, _, t in tensor_arguments(op, dict(bound))) + sum(o.data.nbytes for o in outputs)


def _seconds(calls: Sequence[Callable[[], Any]], backend: Backend) -> float:
    """Seconds a call, the median of some rounds; on a GPU many calls are one captured graph, so gaps do not count.

    The calls take turns, and a round's results are kept until its end.
    """
    calls[0]()
    backend.synchronize()
    begin = time.perf_counter()
    calls[0]()
    backend.synchronize()
    repeats = max(1, min(50, int(_TARGET_S / max(time.perf_counter() - begin, 1e-6))))

    def many() -> None:
        kept = [calls[i % len(calls)]() for i in range(repeats)]
        del kept

    whole = capture(many, backend.name)
    whole()
    times = list(_rounds(whole, backend))
    return statistics.median(times) / repeats


def _rounds(fn: Callable[[], None], backend: Backend) -> Iterator[float]:
    fn()
    for _ in range(_ROUNDS):
        backend.synchronize()
        begin = time.perf_counter()
        fn()
        backend.synchronize()
        yield time.perf_counter() - begin


def table(result: Mapping[str, Any]) -> str:
    """The result as lines of text."""
    how = f"{result['dtype']}{'' if result['deterministic'] else ', not deterministic'}"
    best = f"{result['ceiling TFLOP/s']} TFLOP/s, {result['ceiling TB/s']} TB/s"
    lines = [f"{result['device']}, {how}; this machine's own ceilings: {best}"]
    for r in result["ops"]:
        ratio = "" if r["ratio"] is None else f"  {r['ratio']:.2f} of torch's {r['torch_us']} us"
        why = f" ({r['declined']})" if r["declined"] else ""
        lines.append(
            f"{r['op']:<28} {r['phase']:<8} {r['us']:>10.1f} us {r['rate']:>9.3f} {r['unit']:<8} {r['share']:>6.1%}  "
            f"{r['implementation']}{why}{ratio}  [{r['shapes']}]"
        )
    return "\n".join(lines)
