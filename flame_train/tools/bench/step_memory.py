"""`bench memory`: what a training step takes, by kind and by op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flame_train.engine import Tensor
from flame_train.engine.memory_report import memory_report, saved_by_op
from flame_train.errors import out_of_memory
from flame_train.training.step import batch_losses

from .lora_step import SMALLER, BenchCase, prepare


@out_of_memory(SMALLER)
def run(case: BenchCase) -> dict[str, Any]:
    """Bytes by kind and by op. Weights are random.

    `kept` are the bytes that the graph holds after the forward pass, weights excluded: the activations. Together with
    `workspace`, the ops' temporary memory at that time, it is the peak of a step.
    """
    p = prepare(case)
    s, arena = p.state, p.state.optimizer.arena
    loss = batch_losses(s.denoiser, s.objective, s.dtype, s.seed, p.batch)[0].mean()
    frozen = [part for _, w in p.network.weights() for part in ([w] if isinstance(w, Tensor) else w.stored)]
    kept = saved_by_op(loss, besides=[*frozen, arena.compute_values])
    del loss
    with memory_report() as report:
        p.step()
    return {
        **asdict(case),
        "weights": p.frozen_bytes,
        "adapters": sum(int(a.nbytes) for a in (arena.values, arena.compute_values) if a is not None),
        "gradients": int(arena.grads.nbytes),
        "optimizer": sum(int(a.nbytes) for a in s.optimizer.state_dict().values()),
        "kept": sum(kept.values()),
        "workspace": report.peak - sum(kept.values()),
        "peak of what ops make": report.peak,
        "kept by op": kept,
        "by op": [
            {"op": r.op, "phase": r.phase, "calls": r.calls, "made": r.made, "passing": r.passing, "at peak": r.at_peak}
            for r in report.rows()
        ],
    }


def table(result: Mapping[str, Any]) -> str:
    """Returns the result as lines of text, in MiB."""
    kinds = ("weights", "adapters", "gradients", "optimizer", "kept", "workspace", "peak of what ops make")
    lines = [f"{name:<28}{result[name] / 2**20:>12.2f} MiB" for name in kinds]
    lines += ["", "kept for the backward pass, by op"]
    lines += [f"{op:<34}{n / 2**20:>12.2f} MiB" for op, n in result["kept by op"].items()]
    lines += ["", f"{'op':<32}{'phase':<10}{'calls':>7}{'made MiB':>12}{'passing':>12}{'at peak':>12}"]
    lines += [
        f"{r['op']:<32}{r['phase']:<10}{r['calls']:>7}{r['made'] / 2**20:>12.2f}"
        f"{r['passing'] / 2**20:>12.2f}{r['at peak'] / 2**20:>12.2f}"
        for r in result["by op"]
    ]
    return "\n".join(lines)
