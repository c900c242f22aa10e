"""The first and the last sample grid of a run, side by side, with labels."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from flame_train.training.preview import write_png

_HEADER: Final = 20  # pixels
_GAP: Final = 12


def write_before_after(samples: Path, path: Path, steps: int) -> Path | None:
    """Writes the image to `path`; returns None, without writing, if the run has fewer than two grids."""
    from PIL import Image, ImageDraw

    grids = sorted(samples.glob("step-*.png"))
    if len(grids) < 2:
        return None
    before, after = (Image.open(grid).convert("RGB") for grid in (grids[0], grids[-1]))
    sheet = Image.new("RGB", (before.width + _GAP + after.width, _HEADER + max(before.height, after.height)), "white")
    draw = ImageDraw.Draw(sheet)
    for left, grid, label in ((0, before, "before"), (before.width + _GAP, after, f"after {steps} steps")):
        draw.text((left + 2, 4), label, fill="black")
        sheet.paste(grid, (left, _HEADER))
    write_png(path, np.asarray(sheet))
    return path
