"""Measures every op beside PyTorch, and makes a table of what was measured, which the site has as a page.

    python scripts/op_table.py --measure docs/op_times.json [--seconds 190]    on a GPU, with PyTorch
    python scripts/op_table.py            prints the table

Measured are the sizes of `bench ops all`, first in bf16, then in fp32, and products and convolutions in TF32 as well.
Where `--seconds` are over the measurement ends, and the table names what was not reached. `--only fp32,tf32` measures
these anew, `--ops clone,stack` these ops and those that were not reached; both keep the other rows of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "op_times.json"
PRECISIONS = ("bf16", "fp32", "tf32")
ROUNDED = ("matmul", "linear", "bmm", "einsum", "linear_add", "lora_linear", "lora_linears", "feed_forward")
CONVOLUTIONS = ("conv1d", "conv2d", "conv_transpose2d", "lora_conv2d")
LIMIT = 1.2  # of PyTorch's time: what is over it is named above the table


def measure(path: Path, precisions: Sequence[str], seconds: float, some: Sequence[str] = ()) -> None:
    """Writes the times of ops after each precision, while the seconds last; what is not measured keeps its rows.

    Args:
        path: the file.
        precisions: those that are measured.
        seconds: no op is begun after these.
        some: the ops, besides those that were not reached before; none: all.
    """
    from benchmarks import ops
    from flame_train.engine import lazy
    from flame_train.engine.op import REGISTRY

    lazy.load_ops()

    end = time.monotonic() + seconds
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows, missed, failed = (known.get(part, {}) for part in ("rows", "not_reached", "failed"))
    views = set(known.get("views", ()))
    for precision in precisions:
        names = sorted(REGISTRY) if precision != "tf32" else sorted((*ROUNDED, *CONVOLUTIONS))
        if some:
            wanted = {*some, *missed.get(precision, ()), *failed.get(precision, ())}
            names = [name for name in names if name in wanted]
        found = ops.run(names, "cuda", precision, "torch", within=end - time.monotonic())
        rows = [row for row in rows if row["precision"] != precision or row["op"] not in found["reached"]]
        rows += [{k: v for k, v in row.items() if k in KEPT} for row in found["ops"] if row["op"] in found["reached"]]
        views = views.difference(found["reached"]).union(found["views"])
        failed[precision] = found["failed"]
        missed[precision] = [name for name in names if name not in found["reached"]]
        print(
            f"{precision}: {len(found['reached'])} of {len(names)} ops, {end - time.monotonic():.0f} s left", flush=True
        )
        _write(path, {"not_reached": missed, "failed": failed, "views": sorted(views), "rows": rows})


def _write(path: Path, found: dict[str, Any]) -> None:
    import cupy
    import torch

    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    measured = {
        "card": card,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        **found,
    }
    path.write_text(json.dumps(measured, indent=0) + "\n", encoding="utf-8")


KEPT = ("op", "phase", "precision", "shapes", "us", "implementation", "captured", "torch_us", "ratio")


def table(measured: dict[str, Any]) -> str:
    """The table in Markdown, with what it means above it."""
    rows = measured["rows"]
    if not rows:
        return "The ops have not been measured since the table is made by a script.\n"
    rated = [r for r in rows if r["ratio"] is not None]
    lines = [
        f"Measured on {measured['date']}, {measured['card']}, PyTorch {measured['torch']}, by `scripts/op_table.py`.",
        "A time is that of one call, in microseconds. The column beside it divides it by PyTorch's time in the same",
        "precision. Both programs capture their calls in a graph, and no cache holds the arguments.",
        "*View*: the result lies in its input's memory. *Missing*: the row was taken out and not measured anew.",
        "*None*: PyTorch has no counterpart. *Host*: one program cannot be captured, so both were timed call by call.",
        "",
        f"| precision | times | median | over {LIMIT} | which | not reached | failed |",
        "|---|---|---|---|---|---|---|",
        *_summary(rated, measured),
        "",
        "| op | shapes | precision | kernel | forward | of PyTorch | backward | of PyTorch |",
        "|---|---|---|---|---|---|---|---|",
        *_rows(rows, measured["views"]),
    ]
    return "\n".join(lines) + "\n"


def _summary(rated: Sequence[dict[str, Any]], measured: dict[str, Any]) -> Iterator[str]:
    """A line for each precision: how many times there are, their median, and those over the limit."""
    for precision in PRECISIONS:
        ratios = sorted(r["ratio"] for r in rated if r["precision"] == precision)
        over = [r for r in rated if r["precision"] == precision and r["ratio"] > LIMIT]
        names = _named(dict.fromkeys(f"{r['op']} {r['phase']}" for r in over))
        missed = (_named(measured[part].get(precision, ())) for part in ("not_reached", "failed"))
        median = f"{ratios[len(ratios) // 2]:.2f}" if ratios else ""
        yield "| " + " | ".join([precision, str(len(ratios)), median, str(len(over)), names, *missed]) + " |"


def _named(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"`{listed}`" if listed else "none"


def _rows(rows: Sequence[dict[str, Any]], views: Sequence[str]) -> Iterator[str]:
    """A line for each op, size and precision, its two phases side by side."""
    calls: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:  # an op may have two rows of the same shapes, which differ in other arguments
        key = (row["op"], row["shapes"], row["precision"])
        turn = (*key, row["phase"])
        seen[turn] = seen.get(turn, 0) + 1
        calls.setdefault((*key, seen[turn]), {})[row["phase"]] = row
    for (op, shapes, precision, _), phases in sorted(calls.items()):
        forward, backward = phases.get("forward"), phases.get("backward")
        kernel = (forward or backward or {})["implementation"]
        without = "view" if op in views else "missing"
        cells = [op, shapes, precision, kernel, *_cells(forward, without), *_cells(backward, "")]
        yield "| " + " | ".join(cells) + " |"


def _cells(row: dict[str, Any] | None, without: str) -> tuple[str, str]:
    if row is None:
        return without, ""
    time_taken = f"{row['us']:.1f}" + ("" if row["captured"] else " host")
    return time_taken, "none" if row["ratio"] is None else f"{row['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--only", default=",".join(PRECISIONS))
    parser.add_argument("--ops", default="")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.only.split(","), args.seconds, [name for name in args.ops.split(",") if name])
        return
    sys.stdout.write(table(json.loads(MEASURED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
