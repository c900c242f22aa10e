"""`controls.png`: the control images of a run's prompts, small, which its page shows above the samples.

They lie outside the run folder, of which alone the page shows anything. The sheet has a place for each prompt, as a
sample grid has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from flame_train.data.grid import Pixels, grid, png
from flame_train.data.images import load_image
from flame_train.io.runfolder import RunFolder

_LOG = logging.getLogger(__name__)

CONTROLS: Final = "controls.png"
SIDE: Final = 320
"""Pixels: the longer side of a control image there."""


def write_controls(folder: RunFolder, shown: Sequence[Sequence[Path]]) -> None:
    """Writes the control images of each prompt, given by their files; nothing where there are none.

    What fails costs a warning.
    """
    if not any(shown):
        return
    try:
        raw = png(grid([_beside(controls) for controls in shown]))
    except Exception as error:
        _LOG.warning("no %s: %s: %s", CONTROLS, type(error).__name__, error)
        return
    folder.write_report(CONTROLS, raw)


def _beside(controls: Sequence[Path]) -> Pixels:
    """The control images of a prompt beside each other, as high as the first; one white pixel where it has none."""
    small: list[Pixels] = []
    for control in controls:
        image = Image.fromarray(load_image(control)[0])
        image.thumbnail((SIDE, SIDE))
        if small:
            image = image.resize((max(image.width * small[0].shape[0] // image.height, 1), small[0].shape[0]))
        small.append(np.asarray(image))
    return np.concatenate(small, axis=1) if small else np.full((1, 1, 3), 255, np.uint8)
