"""`bench ops`: every op at the sizes that matter, against this machine's own measured ceilings.

A row that arithmetic bounds has one share, of the FLOP/s of a large matrix product. A memory-bound op has two: of the
bandwidth of a large copy, and of a copy of as many bytes. The second shows the possible gain, because few bytes go
slower than many.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from benchmarks import sizes
from benchmarks.flops import differentiable, on_device
from benchmarks.ready import Ready, all_ready
from benchmarks.torch_ops import empty_torch_cache, torch_seconds
from flame_train.engine import Tensor, grad, lazy, no_grad, set_float32_matmul_precision
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import as_dtype, is_float
from flame_train.engine.mode import deterministic
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.op_samples import tensor_arguments
from flame_train.errors import ConfigError, EnvironmentFault
from flame_train.tools.bench.timing import Ceilings, ceilings, seconds, turns

PRECISIONS: Mapping[str, str] = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""The dtype of the inputs by precision. In "tf32" products and convolutions round operands of fp32, PyTorch's too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op at one size. `rate` is in TFLOP/s where arithmetic counts, else TB/s; `share` is of the ceiling.

    `copy_share`, where bytes count, is of what a copy of as many reaches. `captured`: whether both programs were timed
    as one CUDA graph of many calls; else call by call, with the time of the host.
    """

    op: str
    phase: str
    precision: str
    shapes: str
    us: float
    rate: float
    unit: str
    share: float
    copy_share: float | None
    implementation: str
    declined: str
    captured: bool = True
    torch_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's."""
        return None if self.torch_us is None else self.us / self.torch_us


def run(
    names: list[str],
    device: str,
    precision: str,
    against: str | None,
    exact: bool = True,
    within: float = math.inf,
) -> dict[str, Any]:
    """Times ops, forward and backward. The gradients go to every argument but the base weights of a LoRA step.

    Args:
        names: the ops; none: those of an SDXL step; "all": every op with sizes for measuring.
        device: "cuda" or "cpu".
        precision: of the inputs, which exceed the cache, and of products of them; see `PRECISIONS`.
        against: "torch" also times PyTorch, in the same precision; None: this program only.
        exact: whether our kernels give the same bits in every run.
        within: after so many seconds no other size is begun.

    Returns:
        The device, its ceilings, and a row for each op and phase; then the ops that were timed at all their sizes,
        those of several that failed, with the reason, and those whose results are views.

    Raises:
        ConfigError: an unknown op.
        EnvironmentFault: `against` is not installed.
        RuntimeError: the only op failed.
    """
    lazy.load_ops()
    _check_names(names)
    if against and importlib.util.find_spec(against) is None:
        raise EnvironmentFault(f"bench ops --against {against}: it is not installed; leave the option out")
    backend, low = get_backend(device), as_dtype(PRECISIONS[precision])
    with deterministic(exact), set_float32_matmul_precision("high" if precision == "tf32" else "highest"):
        end, limits, chosen = time.monotonic() + within, ceilings(backend, low), [*_chosen(names)]
        rows, failed, views, reached = list[Row](), dict[str, str](), set[str](), 0
        for call in all_ready(chosen, backend, low):
            if time.monotonic() > end:
                break
            try:
                found = [*timed(call, precision, backend, limits, against)]
                rows += found
                if not any(row.phase == "forward" for row in found):
                    views.add(call.op.name)
            except (RuntimeError, MemoryError) as error:
                if len(names) == 1 and names != ["all"]:
                    raise
                failed[call.op.name] = f"{error}".partition("\n")[0]
            reached += 1
            gc.collect()  # a captured call may lie in a reference cycle, with all the memory of its graph
            backend.empty_cache()
            if against:
                empty_torch_cache()
    return {
        "device": device,
        "precision": precision,
        "deterministic": exact,
        "ceiling TFLOP/s": round(limits.flops / 1e12, 3),
        "ceiling TB/s": round(limits.bandwidth / 1e12, 4),
        "ops": [asdict(r) | {"ratio": r.ratio} for r in rows],
        "reached": sorted({op.name for op, _ in chosen} - {op.name for op, _ in chosen[reached:]}),
        "failed": failed,
        "views": sorted(views),
    }


def _chosen(names: list[str]) -> Iterator[tuple[Op, Sample]]:
    step, more = sizes.STEP, sizes.MORE
    every = sorted({*step, *more})
    for name in every if names == ["all"] else names or sorted(step):
        op = REGISTRY[name]
        samples = more.get(name) or step.get(name) if names else step[name]
        for s in samples or [*op.iter_perf_samples()] or [*op.iter_samples()]:
            yield op, s


def _check_names(names: list[str]) -> None:
    unknown = [n for n in names if n not in REGISTRY and names != ["all"]]
    if unknown:
        near = get_close_matches(unknown[0], REGISTRY, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"bench ops: no op named {unknown[0]!r}{hint}")


def timed(call: Ready, precision: str, backend: Backend, limits: Ceilings, against: str | None) -> Iterator[Row]:
    """Times an op's forward pass and, if there is one, its backward pass. A result that is a view takes no time.

    Args:
        call: the op with its arguments.
        precision: the row's; the modes that it means are in force.
        backend: the device.
        limits: the ceilings of the machine.
        against: "torch" also times PyTorch.

    Returns:
        Two rows at the most.
    """
    op, wanted = call.op, call.wanted
    sets = _argument_sets(call, backend)
    with no_grad():
        result = op(**sets[0])

    def row(phase: str, calls: list[Callable[[], Any]], work: float, moved: int) -> Row:
        def times(captured: bool) -> tuple[float, float | None]:
            ours = seconds(calls, backend, captured)
            return ours, torch_seconds(op, sets, wanted, backend.name, phase, captured) if against else None

        captured = backend.asynchronous
        try:
            found = times(captured)
        except RuntimeError:
            if not captured:
                raise
            captured, found = False, times(False)
        return _row(op, (phase, precision, captured), sets[0], found, (work, moved), limits)

    def forward(bound: dict[str, Any]) -> Any:
        with no_grad():
            return op(**bound)

    if not _is_view(result, (t.data for _, _, t in tensor_arguments(op, sets[0])), backend):
        moved = _bytes(op, sets[0], result)
        yield row("forward", [partial(forward, bound) for bound in sets], call.counted.forward, moved)
    if calls := [c for bound in sets if (c := _backward(op, bound, wanted, backend))]:
        yield row("backward", [c for c, _ in calls], call.counted.backward, calls[0][1])


def _is_view(result: Any, inputs: Iterable[Any], backend: Backend) -> bool:
    """Tells whether the results lie in the memory of the inputs."""
    found, given = result if isinstance(result, (tuple, list)) else (result,), list(inputs)
    return all(any(backend.xp.may_share_memory(o.data, i) for i in given) for o in found)


def _argument_sets(call: Ready, backend: Backend) -> list[dict[str, Any]]:
    """The arguments, as many times as it takes for them to be gone from the cache when their turn comes again."""
    first = on_device(call.host, backend.name)
    size = sum(t.data.nbytes for _, _, t in tensor_arguments(call.op, first))

    def again(value: Any) -> Any:
        if isinstance(value, list):
            return [again(v) for v in value]
        return Tensor(value.data.copy()) if isinstance(value, Tensor) else value

    return [first, *({n: again(v) for n, v in first.items()} for _ in range(turns(size, backend) - 1))]


def _backward(
    op: Op, bound: dict[str, Any], wanted: Sequence[str], backend: Backend
) -> tuple[Callable[[], Any], int] | None:
    """Returns the backward pass of one call as a function, and the bytes it must move; None if there is none to run."""
    leaves = [t for name, _, t in tensor_arguments(op, bound) if name in wanted and is_float(t.dtype)]
    for t in leaves:
        t.requires_grad_()
    outs = differentiable(op(**bound))
    if not leaves or not outs:
        return None
    gs = [Tensor(o.data.copy()) for o in outs]
    kept = {id(v): v.nbytes for o in outs if o._node is not None for v in o._node.saved_arrays}

    def run() -> Any:
        return grad(outs, leaves, gs, retain_graph=True, allow_unused=True)

    made = [t for t in run() if t is not None]
    given = [g.data for g in gs]
    if _is_view(made, given, backend):
        return None
    new = sum(t.data.nbytes for t in made if not _is_view(t, given, backend))
    return run, sum(g.nbytes for g in given) + sum(kept.values()) + new


def _row(
    op: Op,
    how: tuple[str, str, bool],
    bound: dict[str, Any],
    times: tuple[float, float | None],
    done: tuple[float, int],
    limits: Ceilings,
) -> Row:
    """Returns one line of the report.

    Args:
        op: the op.
        how: "forward" or "backward", the precision, and whether the calls were captured.
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
    (ours, theirs), (work, moved), (phase, precision, captured) = times, done, how
    rate, unit, top = (work / ours, "TFLOP/s", limits.flops) if work else (moved / ours, "TB/s", limits.bandwidth)
    of_copy = None if work else round(rate / limits.copy(moved), 4)
    return Row(
        op.name,
        phase,
        precision,
        shapes,
        round(ours * 1e6, 2),
        round(rate / 1e12, 4),
        unit,
        round(rate / top, 4),
        of_copy,
        chosen,
        declined,
        captured,
        None if theirs is None else round(theirs * 1e6, 2),
    )


def _bytes(op: Op, bound: Mapping[str, Any], result: Any) -> int:
    """Returns each input read once, each output written once."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    return sum(t.data.nbytes for _, _, t in tensor_arguments(op, dict(bound))) + sum(o.data.nbytes for o in outputs)


def table(result: Mapping[str, Any]) -> str:
    """Returns the result as lines of text."""
    how = f"{result['precision']}{'' if result['deterministic'] else ', not deterministic'}"
    best = f"{result['ceiling TFLOP/s']} TFLOP/s, {result['ceiling TB/s']} TB/s"
    lines = [f"{result['device']}, {how}; this machine's own ceilings: {best}, and a copy of as many bytes"]
    for r in result["ops"]:
        ratio = "" if r["ratio"] is None else f"  {r['ratio']:.2f} of torch's {r['torch_us']} us"
        of_copy = " " * 14 if r["copy_share"] is None else f"{r['copy_share']:>6.1%} of copy"
        why = "" if r["captured"] or result["device"] == "cpu" else " call by call"
        why += f" ({r['declined']})" if r["declined"] else ""
        lines.append(
            f"{r['op']:<32} {r['phase']:<8} {r['precision']} {r['us']:>10.1f} us {r['rate']:>9.3f} {r['unit']:<8} "
            f"{r['share']:>6.1%} of ceiling {of_copy}  "
            f"{r['implementation']}{why}{ratio}  [{r['shapes']}]"
        )
    lines += [f"{name:<32} failed: {why}" for name, why in result["failed"].items()]
    return "\n".join(lines)
