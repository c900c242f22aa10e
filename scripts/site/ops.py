"""The site's page of operations, from the registry.

`python scripts/site/ops.py op_errors.jsonl` takes in what tests/gpu/test_every_op_gpu.py wrote to $OUT on a GPU.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections import defaultdict
from pathlib import Path

from flame_train.engine import functional
from flame_train.engine.op import REGISTRY, Op

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "op_errors.json"

HEAD = """# Operations

Every op has a reference that runs on NumPy and CuPy alike, a gradient for
the arguments in bold, samples that the tests run on, and messages for input it refuses. Names, order and defaults of
arguments are PyTorch's where the last column names a counterpart; values and gradients are then held to PyTorch's, to a
relative error of 1e-5 in fp32 and 1e-10 in fp64. `*` separates what is given by name only. Ops that take images have
`layout`: "NCHW" as in PyTorch, or "NHWC".

Dtypes: `floats` are fp64, fp32, bf16 and fp16, the last two computed in fp32 and rounded once, and what else is given
is raised to them; `numbers` are floats, and whole numbers and truth values as they are; `any` moves data of every dtype
as it is; `by parts` is the sequence of ops that the formula says, each part rounded. Why is in
[numerics.md](numerics.md). Implementations beside the reference run on CUDA where their conditions hold; `explain` says
which one a call takes. The measured error is the worst over samples, dtypes and gradients on a GPU, as a share of what
is allowed: twice the reference's own error in the same precision plus one unit in the last place.
"""


def page() -> str:
    """The whole page."""
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    by_module: dict[str, list[Op]] = defaultdict(list)
    for op in (REGISTRY[name] for name in functional.__all__):
        by_module[op.fn.__module__.removeprefix("flame_train.engine.ops.").replace(".", "/")].append(op)
    parts = [HEAD, f"{len(functional.__all__)} ops.\n"]
    for module in sorted(by_module):
        title = (inspect.getmodule(by_module[module][0].fn).__doc__ or "").strip().splitlines()[0]
        parts.append(f"## {module}\n\n{title}\n\n" + table(by_module[module], measured))
    return "\n".join(parts)


def table(ops: list[Op], measured: dict[str, float]) -> str:
    """One row an op, in the order in which they are declared."""
    lines = [
        "| op | formula | dtypes | implementations | measured error | PyTorch |",
        "|---|---|---|---|---|---|",
    ]
    for op in ops:
        error = f"{measured[op.name]:.2f}" if op.name in measured else "—"
        torch = f"`{op.torch}`" if op.torch else ""
        row = [call(op), formula(op), dtypes(op), ", ".join(implementations(op)), error, torch]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def call(op: Op) -> str:
    """The op with its arguments: differentiable ones in bold, defaults shown."""
    assert getattr(functional, op.name) is op
    parts, named = [], False
    for p in op.params:
        if p.named and not named:
            parts.append("\\*")
            named = True
        name = f"**{p.name}**" if p.name in op.differentiable else p.name
        parts.append(name if p.default is inspect.Parameter.empty else f"{name}={p.default!r}")
    return f"`{op.name}` ({', '.join(parts)})"


def formula(op: Op) -> str:
    """The first line of the docstring."""
    return (op.fn.__doc__ or "").strip().splitlines()[0].replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


def dtypes(op: Op) -> str:
    """What the op takes, and how bf16 and fp16 are computed."""
    return "by parts" if op.composite else "any" if op.data_movement else "floats" if op.promoted else "numbers"


def implementations(op: Op) -> list[str]:
    """The reference and every kernel, with the gradients that have one too."""
    found = ["body" if op.composite else "reference"]
    for impl in dict.fromkeys(k.impl for k in op.kernels):
        gradients = dict.fromkeys(a for f in op.kernel_formulas if f.impl == impl for a in f.args)
        found.append(f"{impl} (gradients: {', '.join(gradients)})" if gradients else impl)
    return found


def take_in(lines: Path) -> None:
    """Keeps each op's worst error of a GPU run."""
    worst: dict[str, float] = {}
    for row in map(json.loads, lines.read_text(encoding="utf-8").splitlines()):
        worst[row["op"]] = max(worst.get(row["op"], 0.0), row["of_limit"])
    kept = {name: round(worst[name], 3) for name in sorted(worst) if name in functional.__all__}
    MEASURED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path)
    take_in(parser.parse_args().measured)
