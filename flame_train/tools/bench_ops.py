"""`bench ops`: every op at the sizes that matter, against this machine's own measured ceilings.

A row that arithmetic bounds has one share, of the FLOP/s of a large matrix product. A memory-bound op has two: of the
bandwidth of a large copy, and of a copy of as many bytes. The second shows the possible gain, because few bytes go
slower than many.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from flame_train.engine import Tensor, grad, no_grad
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import DType, as_dtype, is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.mode import deterministic
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from flame_train.errors import ConfigError, EnvironmentFault
from flame_train.tools import bench_sizes
from flame_train.tools.bench_ceilings import Ceilings, ceilings
from flame_train.tools.bench_clock import seconds, turns
from flame_train.tools.bench_flops import op_flops
from flame_train.tools.bench_torch import torch_seconds

FROZEN: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "conv2d": ("weight", "bias"),
    "lora_linear": ("weight", "bias"),
}
"""The base weights, which a LoRA step does not differentiate, by op."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op at one size. `rate` is in TFLOP/s where arithmetic counts, else TB/s; `share` is of the ceiling.

    `copy_share`, where bytes count, is of what a copy of as many reaches.
    """

    op: str
    phase: str
    shapes: str
    us: float
    rate: float
    unit: str
    share: float
    copy_share: float | None
    implementation: str
    declined: str
    torch_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's."""
        return None if self.torch_us is None else self.us / self.torch_us


def run(names: list[str], device: str, dtype: str, against: str | None, exact: bool = True) -> dict[str, Any]:
    """Times ops, forward and backward. The gradients go to every argument but the base weights of a LoRA step.

    Args:
        names: the ops; none: those of an SDXL step; "all": every op with sizes for measuring.
        device: "cuda" or "cpu".
        dtype: dtype of the inputs, which exceed the cache.
        against: "torch" also times PyTorch, with its defaults; None: this program only.
        exact: whether our kernels give the same bits in every run.

    Returns:
        The device, its ceilings, and a row for each op and phase.

    Raises:
        ConfigError: an unknown op.
        EnvironmentFault: `against` is not installed.
    """
    _check_names(names)
    if against and importlib.util.find_spec(against) is None:
        raise EnvironmentFault(f"bench ops --against {against}: it is not installed; leave the option out")
    backend, low = get_backend(device), as_dtype(dtype)
    limits = ceilings(backend, low)
    with deterministic(exact):
        rows = [r for op, s in _chosen(names) for r in _rows(op, s, backend, low, limits, against)]
    return {
        "device": device,
        "dtype": dtype,
        "deterministic": exact,
        "ceiling TFLOP/s": round(limits.flops / 1e12, 3),
        "ceiling TB/s": round(limits.bandwidth / 1e12, 4),
        "ops": [asdict(r) | {"ratio": r.ratio} for r in rows],
    }


def _chosen(names: list[str]) -> Iterator[tuple[Op, Sample]]:
    step, more = bench_sizes.STEP, bench_sizes.MORE
    every = sorted({*step, *more})
    for name in every if names == ["all"] else names or sorted(step):
        op = REGISTRY[name]
        sizes = more.get(name) or step.get(name) if names else step[name]
        for s in sizes or [*op.iter_perf_samples()] or [*op.iter_samples()]:
            yield op, s


def _check_names(names: list[str]) -> None:
    unknown = [n for n in names if n not in REGISTRY and names != ["all"]]
    if unknown:
        near = get_close_matches(unknown[0], REGISTRY, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"bench ops: no op named {unknown[0]!r}{hint}")


def _rows(op: Op, s: Sample, backend: Backend, dtype: DType, limits: Ceilings, against: str | None) -> Iterator[Row]:
    """Times an op's forward pass and, if there is one, its backward pass.

    Args:
        op: the op.
        s: the sample with its arguments.
        backend: the device.
        dtype: dtype of the inputs.
        limits: the ceilings of the machine.
        against: "torch" also times PyTorch.

    Returns:
        One row or two.
    """
    sets, wanted = _argument_sets(op, s, backend, dtype), _wanted(op)
    with no_grad():
        result = op(**sets[0])

    def row(phase: str, calls: list[Callable[[], Any]], work: float, moved: int) -> Row:
        ours = seconds(calls, backend)
        theirs = torch_seconds(op, sets, wanted, backend.name, phase) if against else None
        return _row(op, phase, sets[0], (ours, theirs), (work, moved), limits)

    def forward(bound: dict[str, Any]) -> Any:
        with no_grad():
            return op(**bound)

    there, back = op_flops(op, s, dtype, wanted)
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

    def again(value: Any) -> Any:
        if isinstance(value, list):
            return [again(v) for v in value]
        return Tensor(value.data.copy()) if isinstance(value, Tensor) else value

    return [first, *({n: again(v) for n, v in first.items()} for _ in range(turns(size, backend) - 1))]


def _backward(op: Op, bound: dict[str, Any], wanted: Sequence[str]) -> tuple[Callable[[], Any], int] | None:
    """The backward pass of one call as a function, and the bytes it must move; None if there is none to run."""
    leaves = [t for name, _, t in tensor_arguments(op, bound) if name in wanted and is_float(t.dtype)]
    for t in leaves:
        t.requires_grad_()
    out = op(**bound)
    if not isinstance(out, Tensor) or out._node is None:
        return None
    g = Tensor(out.data.copy())
    kept = {id(v): v.nbytes for v in out._node.saved_arrays}

    def run() -> Any:
        return grad([out], leaves, [g], retain_graph=True)

    made = [t.data for t in run()]
    if all(x is g.data for x in made):
        return None
    return run, g.data.nbytes + sum(kept.values()) + sum(
        x.nbytes for x in made if x is not g.data and 0 not in x.strides
    )


def _row(
    op: Op,
    phase: str,
    bound: dict[str, Any],
    times: tuple[float, float | None],
    done: tuple[float, int],
    limits: Ceilings,
) -> Row:
    """One line of the report.

    Args:
        op: the op.
        phase: "forward" or "backward".
        bound: the op's arguments.
        times: our seconds, and PyTorch's or None.
        done: the FLOP, 0 where they are not counted, and the bytes.
        limits: the ceilings of the machine.

    Returns:
        The row.
    """
    choices = explain(op, **bound)
    chosen = next(i for i, why in choices if why == "chosen")
    declined = "; ".join(f"{i}: {why}" for i, why in choices if i != chosen and "passed over" not in why)
    shapes = " ".join("x".join(map(str, t.shape)) for _, _, t in tensor_arguments(op, bound))
    (ours, theirs), (work, moved) = times, done
    rate, unit, top = (work / ours, "TFLOP/s", limits.flops) if work else (moved / ours, "TB/s", limits.bandwidth)
    of_copy = None if work else round(rate / limits.copy(moved), 4)
    return Row(
        op.name,
        phase,
        shapes,
        round(ours * 1e6, 2),
        round(rate / 1e12, 4),
        unit,
        round(rate / top, 4),
        of_copy,
        chosen,
        declined,
        None if theirs is None else round(theirs * 1e6, 2),
    )


def _bytes(op: Op, bound: Mapping[str, Any], result: Any) -> int:
    """Each input read once, each output written once."""
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(t.data.nbytes for _, _, t in tensor_arguments(op, dict(bound))) + sum(o.data.nbytes for o in outputs)


def table(result: Mapping[str, Any]) -> str:
    """The result as lines of text."""
    how = f"{result['dtype']}{'' if result['deterministic'] else ', not deterministic'}"
    best = f"{result['ceiling TFLOP/s']} TFLOP/s, {result['ceiling TB/s']} TB/s"
    lines = [f"{result['device']}, {how}; this machine's own ceilings: {best}, and a copy of as many bytes"]
    for r in result["ops"]:
        ratio = "" if r["ratio"] is None else f"  {r['ratio']:.2f} of torch's {r['torch_us']} us"
        of_copy = " " * 14 if r["copy_share"] is None else f"{r['copy_share']:>6.1%} of copy"
        why = f" ({r['declined']})" if r["declined"] else ""
        lines.append(
            f"{r['op']:<28} {r['phase']:<8} {r['us']:>10.1f} us {r['rate']:>9.3f} {r['unit']:<8} "
            f"{r['share']:>6.1%} of ceiling {of_copy}  "
            f"{r['implementation']}{why}{ratio}  [{r['shapes']}]"
        )
    return "\n".join(lines)
