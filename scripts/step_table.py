"""Write `docs/figures.md`: the measured steps of `docs/step_times.json` as a table.

python scripts/step_table.py           prints the page
python scripts/step_table.py --write   writes it

A measurement is one object of the JSON file. `ms` is the time of a step, `gib` the peak of the GPU's memory. `roofline`
is the share of the floor; it and `gib` are null where they were not measured. A test holds the page to the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "step_times.json"
PAGE = ROOT / "docs" / "figures.md"

HEAD = """# Figures: time and memory of a training step

`scripts/step_table.py` writes this page from `docs/step_times.json`; do not edit it.

Every step trains a LoRA of rank 16 at 1024 x 1024 in bf16. In SDXL and SD3.5 the LoRA adapts the attention layers, in
the other models what their preset names. Weights are random, because no published checkpoint was at hand; the
arithmetic is the same. `[n]` names the command below the table, with the options as they are spelled today.
`docs/log/` has every measurement with its date, failures included.

The floor is the arithmetic of the step at the rate of the card's best matrix product. "Same bytes" says
whether sums have a fixed order, so that a step gives the same bytes each time. `train.deterministic = false` gives that
up; PyTorch ran without it too.
"""

FOOT = """
PyTorch is 2.11 with diffusers 0.42 and PEFT. On this machine PyTorch's steps wait for the host, at batch 1 most of all.
Rows of one command were measured in one call on one card. Other rows come from other days and cards, which differ by 2
to 3 %. In the call that measured products in int8, bf16 without a fixed order took, in ms: SDXL 128.9, Flux dev 319.2,
Krea 2 501.2, Z-Image 265.5, Qwen-Image 2.1 312.8, FLUX.2 klein 4B 150.2.

Three aims in bf16 are missed: 115 ms for SDXL at batch 4, 220 ms for SD3.5 medium at batch 4, and 140 ms for SD3.5
large. The card reaches its power limit in all three. `docs/log/` says where the time goes and what was tried.
Of the models of 2026 FLUX.2 klein 9B meets its aim of 330 ms, and klein 4B its 155 within a per cent. Z-Image (245),
Krea 2 (500), Qwen-Image (305) and Anima (85) miss theirs. None but Anima is 1.3 times as fast as PyTorch.
Wan 2.2 is 3.7 times as fast, on stills of 1,024 tokens.

Nobody has measured a step on another card than an H100 or H200. For other cards, from an A100 to an RTX 5090, the tests
show that every kernel compiles and fits.
"""


def page(measured: list[dict[str, Any]]) -> str:
    """The page in Markdown: a row for each measurement, then the numbered commands."""
    commands = list(dict.fromkeys(row["command"] for row in measured))
    lines = [
        "| model | batch | settings | program | ms a step | images/s | peak GiB | floor | same bytes | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row, commands.index(row["command"]) + 1) for row in measured]
    listed = [f"{number}. `{command}`" for number, command in enumerate(commands, 1)]
    return "\n".join([HEAD, *lines, "", "Commands:", "", *listed, FOOT])


def _row(measurement: dict[str, Any], command: int) -> str:
    share = measurement["roofline"]
    cells = [
        measurement["model"],
        str(measurement["batch"]),
        _code(measurement["settings"]),
        measurement["program"],
        f"{measurement['ms']:.1f}",
        f"{measurement['batch'] / measurement['ms'] * 1000:.1f}",
        "" if (gib := measurement["gib"]) is None else f"{gib:.1f}",
        "" if share is None else f"{share * 100:.0f} %",
        "yes" if measurement["deterministic"] else "no",
        f"{measurement['date']}, {measurement['card']} [{command}]",
    ]
    return "| " + " | ".join(cells) + " |"


def _code(settings: str) -> str:
    """The keys of a config that differ from the defaults, as code."""
    return ", ".join(f"`{key}`" for key in settings.split("; ") if key)


if __name__ == "__main__":
    text = page(json.loads(MEASURED.read_text(encoding="utf-8")))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
