"""One image of two runs on the distilled small SDXL: few-step samples before, after with the adapter, after without it.

    python scripts/small_sdxl/distilled_page.py WITH WITHOUT STEP OUT.png

WITH and WITHOUT are run folders such as `tests/tools/test_small_distilled.py` makes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from flame_train.quickstart.page import Row, grid_images, write_page

SHOWN = (0, 1, 4, 5, 6, 7)
"""The numbers of the prompts on the page: two that are taught, and four that the model knew."""


def main() -> None:
    with_adapter, without, step, output = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    listed = tomllib.loads((with_adapter / "config.toml").read_text())["sample"]["prompts"]
    prompts = [each if isinstance(each, str) else each["text"] for each in listed]

    def row(heading: str, run: Path, at: int) -> Row:
        images = grid_images(run / "samples" / f"step-{at:06d}.png", prompts)
        return Row(heading, [images[i] for i in SHOWN])

    rows = [
        row("Before training, in four steps", with_adapter, 0),
        row(f"After {step} steps with the training adapter, drawn without it", with_adapter, step),
        row(f"After {step} steps without an adapter", without, step),
    ]
    title = "A LoRA on a distilled model; right of the line, what the model knew before"
    write_page(output, title, rows, line_before=2)


if __name__ == "__main__":
    main()
