"""The text in a sampled PNG from which web interfaces read how it was made, as AUTOMATIC1111 writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flame_train.diffusion.samplers import SAMPLERS
from flame_train.run.sampling.requests import Request
from flame_train.version import __version__


def parameters_of(request: Request, checkpoint: str, loras: Sequence[tuple[Path, float]]) -> str:
    """The prompt with each LoRA as `<lora:name:strength>`, the negative prompt, and a line of settings.

    `loras` are the files with their strengths.
    """
    tags = [f"<lora:{path.stem}:{strength * request.strength:g}>" for path, strength in loras]
    lines = [" ".join([request.text, *tags])]
    if request.negative:
        lines.append(f"Negative prompt: {request.negative}")
    height, width = request.size
    settings = {
        "Steps": str(request.steps),
        "Sampler": SAMPLERS[request.sampler].usual_name,
        "CFG scale": f"{request.guidance_scale:g}",
        "Seed": str(request.seed),
        "Size": f"{width}x{height}",
        "Model": _quoted(Path(checkpoint).stem),
        "Version": _quoted(f"flame-train {__version__}"),
    }
    lines.append(", ".join(f"{name}: {value}" for name, value in settings.items()))
    return "\n".join(lines)


def _quoted(value: str) -> str:
    """A value that holds what separates values stands in quotes."""
    return '"' + value.replace('"', '\\"') + '"' if any(c in value for c in ',:\n"') else value
