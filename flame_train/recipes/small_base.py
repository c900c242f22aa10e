"""The small SDXL that comes with the package: trained from scratch by this engine, on the drawn world of `drawings`.

SDXL's structure with 7 million weights: two text encoders over CLIP's vocabulary, autoencoder, UNet, under the
published single file's names. It draws what a caption of that world says. How it was made: `scripts/small_sdxl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flame_train.io.durable import write_durably

SMALL_BASE: Final = Path(__file__).with_name("assets") / "small_sdxl.safetensors"
"""The checkpoint, fp16."""


def copy_small_base(path: Path) -> None:
    """Copies the checkpoint to `path`, whole or not at all. Raises OutputError."""
    raw = SMALL_BASE.read_bytes()
    write_durably(path, [raw], len(raw))
