"""What our own kernels save where that is in doubt: a table of steps and of ops, with each kernel and without it.

    python -m benchmarks.kernel_shares [--steps] [--ops] [--model flux] [--json FILE]    on a GPU, with PyTorch

A kernel stays where a step takes 2 % longer without it, or where without it an op takes over 1.5 times PyTorch's time.
Without a kernel an op runs its reference on CuPy, and an optimizer's rule runs operation by operation. Both run in a
captured graph, as a step does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks import ops as bench_ops
from flame_train.engine import lazy
from flame_train.engine.op import REGISTRY
from flame_train.engine.ops.linear import hadamard_mma
from flame_train.engine.optim.update import FusedUpdate
from flame_train.tools.bench import BenchCase, step

STEP_SHARE: Final = 0.02
OP_RATIO: Final = 1.5
RULES: Final = ("adafactor", "adamw8bit", "automagic", "came", "prodigy_schedule_free")
"""Optimizers that have a kernel in a `.cuh` of their own."""
KINDS: Final = {"loha": "hadamard_add", "lokr": "kron_add", "dora": "dora_gain"}
"""The op with kernels of its own, by kind of adapter."""
OPS: Final = (
    *("sort", "topk", "cumsum", "prod", "argmax", "max_dim", "gather", "scatter_add", "index_select", "take_along_dim"),
    *("max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d", "interpolate", "unfold", "fold"),
    *("cross_entropy", "cosine_similarity", "embedding", "batch_norm_train", "hadamard_add", "kron_add", "dora_gain"),
)
"""Ops of the library, and others, whose kernels are written by hand."""


@contextmanager
def without_kernels(name: str) -> Iterator[None]:
    """Runs the op's reference alone, forward and backward."""
    op = REGISTRY[name]
    with mock.patch.object(op, "kernels", []), mock.patch.object(op, "kernel_formulas", []):
        yield


def steps(model: str) -> Iterator[dict[str, Any]]:
    """Times the step of each adapter kind and optimizer that has kernels of its own, with them and without."""
    case = BenchCase(model)
    for kind, op in KINDS.items():
        yield _compared(f"{kind}: {op}", replace(case, settings=(f'lora.kind="{kind}"',)), [without_kernels(op)])
    no_tensor_cores = [mock.patch.object(hadamard_mma, name, return_value=False) for name in ("fit", "fit_gradients")]
    yield _compared("loha: tensor cores", replace(case, settings=('lora.kind="loha"',)), no_tensor_cores)
    by_operations = mock.patch.object(FusedUpdate, "fits", return_value=False)
    for rule in RULES:
        yield _compared(f"optimizer: {rule}", replace(case, optimizer=rule), [by_operations])


def _compared(name: str, case: BenchCase, changes: Sequence[Any]) -> dict[str, Any]:
    try:
        with_kernel = step(case)["captured_ms"]
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            without = step(case)["captured_ms"]
    except Exception as error:  # the other rows are wanted all the same
        return {"kernel": name, "error": f"{error}".partition("\n")[0]}
    share = without / with_kernel - 1.0
    return {"kernel": name, "with": with_kernel, "without": without, "share": share, "stays": share >= STEP_SHARE}


def ops(names: Sequence[str] = OPS, precision: str = "bf16") -> Iterator[dict[str, Any]]:
    """Times each op with its kernels, without them, and PyTorch's; one row a size and phase."""
    for name in names:
        try:
            ours = bench_ops.run([name], "cuda", precision, "torch")["ops"]
            with without_kernels(name):
                plain = bench_ops.run([name], "cuda", precision, "torch")["ops"]
        except Exception as error:
            yield {"kernel": name, "error": f"{error}".partition("\n")[0]}
            continue
        without = {(row["phase"], row["shapes"]): row for row in plain}
        for row in ours:
            other = without.get((row["phase"], row["shapes"]))
            ratio = other["ratio"] if other else None
            yield {
                "kernel": f"{name} {row['phase']} [{row['shapes']}]",
                "with": row["us"],
                "without": other["us"] if other else None,
                "torch": row["torch_us"],
                "share": ratio,
                "stays": ratio is None or ratio > OP_RATIO,
            }


def line(row: dict[str, Any]) -> str:
    """Returns a row of the Markdown table."""
    if "error" in row:
        return f"| {row['kernel']} | failed: {row['error']} | | | | |"
    numbers = [row["with"], row["without"], row.get("torch"), row["share"]]
    cells = ["" if number is None else f"{number:.3g}" for number in numbers]
    return f"| {row['kernel']} | {' | '.join(cells)} | {'stays' if row['stays'] else 'goes'} |"


def main() -> int:
    """Prints the table as it is measured, steps in ms and ops in us, and writes the rows to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="only steps")
    parser.add_argument("--ops", action="store_true", help="only ops")
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lazy.load_ops()
    rows = []
    out = sys.stdout
    out.write(
        "| kernel | with | without | PyTorch | longer, or ratio to PyTorch without | |\n|---|---|---|---|---|---|\n"
    )
    for wanted, measured in ((args.steps, steps(args.model)), (args.ops, ops())):
        if wanted or not (args.steps or args.ops):
            for row in measured:
                rows.append(row)
                out.write(line(row) + "\n")
                out.flush()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
