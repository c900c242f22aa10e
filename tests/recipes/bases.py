"""What the tests of families with random small bases share: the base, its arrays, and a run's first loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.io.safetensors import SafetensorsFile
from flame_train.recipes import FAMILIES

Array = np.ndarray[Any, Any]


def small_base(factory: pytest.TempPathFactory, family: str) -> Path:
    """A small checkpoint of the family with random weights, with what it needs beside it."""
    folder = factory.mktemp(family)
    FAMILIES[family].write_small_base(folder, 3)
    return folder / "base.safetensors"


def arrays_of(path: Path) -> dict[str, Array]:
    """All tensors of a file."""
    with SafetensorsFile(path) as file:
        return {name: np.array(file.read(name)) for name in file.names}


def first_loss(run: Path) -> float:
    """The loss of the first step in a run folder's log."""
    return float(json.loads((run / "log.jsonl").read_text().splitlines()[0])["loss"])
