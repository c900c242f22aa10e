"""What a run has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.io.safetensors import SafetensorsFile


def log_of(run: Path) -> list[dict[str, Any]]:
    """The lines of its log."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    """Each step's loss."""
    return [row["loss"] for row in log_of(run) if "loss" in row]


def arrays_of(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a file."""
    with SafetensorsFile(file) as opened:
        return {name: np.array(opened.read(name)) for name in opened.names}


def bytes_of(file: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a file."""
    return {name: array.tobytes() for name, array in arrays_of(file).items()}


def lora_of(run: Path) -> dict[str, bytes]:
    """The bytes of the LoRA that it trained."""
    return bytes_of(run / "lora.safetensors")
