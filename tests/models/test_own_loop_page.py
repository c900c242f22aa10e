"""The page on SDXL in a loop of one's own: its program runs as it stands on the small SDXL, and its file is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import flame_train.engine as flame
from flame_train.adapters.formats import from_file
from flame_train.models.common.small import SMALL_SDXL
from flame_train.models.sdxl.names import SDXL_FILES, lora_family

PAGE = (Path(__file__).parents[2] / "docs" / "sdxl-in-your-own-loop.md").read_text(encoding="utf-8")


def test_the_program_trains_and_saves_a_lora(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    arch = SDXL_FILES.parts(SMALL_SDXL, ["unet"])["unet"].build().arch
    rng, output = np.random.default_rng(1), tmp_path / "mine.safetensors"
    space: dict[str, Any] = {"checkpoint": SMALL_SDXL, "device": "cpu", "output": output}
    shapes = {"latents": (2, 8, 8, 4), "context": (2, 77, arch.context_dim), "vector": (2, arch.adm_in_channels)}
    space |= {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    exec(compile(program, "page", "exec"), space)
    assert np.isfinite(space["losses"]).all()
    read = from_file(output, lora_family()).state["unet"]
    assert sorted(read) == sorted(space["layers"])
    tensors = flame.load(output)
    for (down, up), name in zip(pairs(tensors), sorted(read, key=kohya), strict=True):
        trained = space["lora"].adapters[name].parameters()
        assert [t.numpy().tobytes() for t in (down, up)] == [t.numpy().tobytes() for t in trained.values()]
        assert up.numpy().any()  # 0 before the first step


def kohya(name: str) -> str:
    return name.replace(".", "_")


def pairs(tensors: dict[str, flame.Tensor]) -> list[tuple[flame.Tensor, flame.Tensor]]:
    """Both matrices of each layer, by its name."""
    layers = sorted({name.partition(".")[0] for name in tensors})
    return [(tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]) for name in layers]
