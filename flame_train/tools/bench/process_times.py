"""`bench step` of several processes: each takes the step by itself, and all with the sum of gradients, by turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final, Literal

from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.distributed.local_memory import keeping_once
from flame_train.engine import capture
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.mode import deterministic
from flame_train.errors import out_of_memory
from flame_train.training.step import State, micro, reduce, update

from .lora_step import SMALLER, BenchCase, Prepared, check_counterpart, gib, peak_gib, predicted, prepare, torch_step

_ROUNDS: Final = 4
_WARM, _TIMED = 3, 10
_FEW = 1, 2  # on a CPU, whose steps take seconds


@out_of_memory(SMALLER)
def measure(
    case: BenchCase, group: ProcessGroup, against: Literal["torch", "torch-compiled"] | None = None
) -> dict[str, Any]:
    """Times a step of every process by itself, all at the same time, and the step that they take together.

    Both have the same weights and buffers, and are captured on a GPU as the training loop does it.

    Args:
        case: the step; `device` is this process's own.
        group: the processes. One by itself may have a communicator too, to see what that costs.
        against: PyTorch's DistributedDataParallel around the same step, eager or with compiled blocks.

    Returns:
        The same in all processes. Milliseconds are medians of the slowest process: `one_ms` of a step by itself, `ms`
        of one together, `sum_ms` of the sum. `share` is images a second in terms of so many times one process's.
        `peak_gib` is of each process, by rank, and `host_gib` what waits in host memory, once for all of a machine.

    Raises:
        ConfigError: settings that allow no step, or that PyTorch's step has no counterpart of.
        EnvironmentFault: PyTorch is not installed.
    """
    if against is not None:
        check_counterpart(case)
    backend = get_backend(case.device)
    once = keeping_once(group, any(setting.startswith("model.offload=") for setting in case.settings))
    with deterministic(case.deterministic):
        with once:
            prepared = prepare(case, group)
        mine, host = _timed(prepared, group), backend.host_bytes
        del prepared
    of_all = [json.loads(text) for text in group.all_gather(json.dumps(mine))]
    slowest = {name: max(each[name] for each in of_all) for name in ("one_ms", "ms", "sum_ms")}
    result = asdict(case) | {"device": case.device.partition(":")[0], "processes": group.world} | slowest
    result |= {
        "images_per_s": round(case.batch * group.world / slowest["ms"] * 1e3, 3),
        "share": round(slowest["one_ms"] / slowest["ms"], 4),
        "peak_gib": [each["peak_gib"] for each in of_all],
    }
    if host:
        result |= {"host_gib": gib(host)}
    if backend.asynchronous:
        result |= {"predicted_gib": gib(predicted(case, group.world).peak)}
    if against is None:
        return result
    theirs = torch_step(case, against == "torch-compiled", group)
    told = [json.loads(text) for text in group.all_gather(json.dumps({n: theirs[n] for n in ("ms", "peak_gib")}))]
    theirs |= {"ms": max(each["ms"] for each in told), "peak_gib": [each["peak_gib"] for each in told]}
    return result | {"torch": theirs, "ratio": round(result["ms"] / theirs["ms"], 4)}


def _timed(p: Prepared, group: ProcessGroup) -> dict[str, Any]:
    """This process's medians, and its peak memory."""
    apart = replace(p.state, group=ALONE, exchanged=None, sent=None)
    steps = {"one_ms": _step(p, apart), "ms": _step(p, p.state), "sum_ms": _launched(lambda: reduce(p.state), p)}
    p.backend.reset_peak()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            group.all_gather("")  # all begin together
            taken[name] += _times(step, p.backend)
    return {name: round(statistics.median(each), 4) for name, each in taken.items()} | {"peak_gib": peak_gib(p.backend)}


def _step(p: Prepared, state: State) -> Callable[[], None]:
    """Runs forward, backward, the sum over all processes and update, as the training loop launches them."""
    parts = [_captured(lambda: micro(state, p.batch), p)]
    if state.exchanged is not None:
        parts.append(_launched(lambda: reduce(state), p))
    parts.append(_captured(lambda: update(state), p))

    def step() -> None:
        for part in parts:
            part()

    return step


def _launched(step: Callable[[], None], p: Prepared) -> Callable[[], None]:
    """Returns the sum, captured where the transport can be."""
    return _captured(step, p) if p.state.group.captured else step


def _captured(step: Callable[[], None], p: Prepared) -> Callable[[], None]:
    """Returns a part of the step as a captured graph, whose first two calls are behind it."""
    replay = capture(step, p.backend.name)
    replay()
    replay()
    return replay


def _times(step: Callable[[], None], backend: Backend) -> list[float]:
    """Milliseconds of single calls, after some that do not count."""
    warm, timed = (_WARM, _TIMED) if backend.asynchronous else _FEW
    taken = []
    for i in range(warm + timed):
        backend.synchronize()
        begin = time.perf_counter()
        step()
        backend.synchronize()
        if i >= warm:
            taken.append((time.perf_counter() - begin) * 1e3)
    return taken
