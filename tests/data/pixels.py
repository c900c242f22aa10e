"""The pixels of an image alone, as `load_image` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flame_train.data.images import load_image


def read_image(path: Path) -> np.ndarray[Any, Any]:
    return load_image(path)[0]
