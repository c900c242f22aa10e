"""The list of model families: the one line that a new family adds. The rest of it is its folder in `models`.

It stands apart because the command line is made from it, and answers `--help` without loading anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

FAMILY_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sdxl": "SDXL",
        "sd3": "SD3 or SD3.5",
        "flux": "Flux.1",
        "zimage": "Z-Image",
        "flux2": "FLUX.2 klein",
        "flux3": "FLUX.3 klein",
        "chroma": "Chroma",
        "krea2": "Krea 2",
        "anima": "Anima",
        "qwenimage1": "Qwen-Image 1",
        "qwenimage": "Qwen-Image 2.1",
    }
)
"""Name -> usual name. `models.<name>.family` has its `Family`, `<name>-lora` is its command."""
