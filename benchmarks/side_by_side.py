"""A step of ours beside PyTorch's, eager and with compiled blocks, at several batch sizes, in one run on one card.

    python -m benchmarks.side_by_side [--model NAME] [--batches 1 2 4 8] [--deterministic]

Prints a Markdown table as it goes: milliseconds, peak GiB, ours over the faster of theirs, and the share of the floor,
which is the step's arithmetic at the rate of this card's best matrix product. Needs a GPU and the parity extra.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import torch_lora_step
from flame_train.tools import bench
from flame_train.tools.bench.models import names

HEAD = "| batch | eager, ms / GiB | compiled, ms / GiB | ours, ms / GiB | ours / theirs | share of the floor |"


def row(case: bench.BenchCase) -> str:
    """One line of the table."""
    ours = bench.step(case)
    eager, compiled = (bench.torch_step(case, compiled) for compiled in (False, True))
    best = min(eager["ms"], compiled["ms"])
    cells = [
        str(case.batch),
        f"{eager['ms']:.1f} / {eager['peak_gib']:.1f}",
        f"{compiled['ms']:.1f} / {compiled['peak_gib']:.1f}{_flaw(compiled)}",
        f"**{ours['captured_ms']:.1f} / {ours['captured_gib']:.1f}**",
        f"{ours['captured_ms'] / best:.2f}",
        f"{ours['share_of_ceiling']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _flaw(compiled: dict[str, Any]) -> str:
    return f" ({compiled['left_eager']} calls left uncompiled)" if compiled["left_eager"] else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", choices=names())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--deterministic", action="store_true", help="ours as it trains by default")
    args = parser.parse_args()
    torch_lora_step.check_installed()
    print(HEAD, "|---" * 6 + "|", sep="\n")
    for batch in args.batches:
        print(row(bench.BenchCase(args.model, batch=batch, deterministic=args.deterministic)), flush=True)


if __name__ == "__main__":
    main()
