"""A network of one layer and a loader of numbered samples: the least that the loop goes round with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.config import schema
from flame_train.engine import Tensor, nn
from flame_train.io.lora_names import LoraComponent, LoraFamily
from flame_train.training.batch import HostBatch

NAMES = LoraFamily("toy", (LoraComponent("unet", "lora_unet", {"proj": "proj"}),), "toy", "toy/lora", "toy", "8x8")


class Toy(nn.Module):
    """One layer over the channels."""

    def __init__(self) -> None:
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


@dataclass
class ToyDenoiser:
    """The layer as a step calls it; latents are drawn from the moments, unscaled."""

    network: Toy

    def denoise(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor | None = None) -> Tensor:
        return self.network(x)

    def sample_latents(self, moments: tuple[Tensor, Tensor], noise: Tensor) -> Tensor:
        return moments[0] + (moments[1] * 0.5).exp() * noise


@dataclass
class Feed:
    """A loader of numbered samples: sample s of the run is always the same, however it is batched."""

    batch: int
    accumulation: int = 1
    shapes: tuple[tuple[int, int], ...] = ((2, 2),)
    next: int = 0
    wait_ms: float = 0.0
    events: list[Any] = field(default_factory=list)
    poison: int = -1
    on_take: Callable[[int], None] = lambda micro: None

    def take(self) -> HostBatch:
        micro, self.next = self.next, self.next + 1
        self.events.append(f"take {micro}")
        self.on_take(micro)
        self.wait_ms = micro + 0.5
        step, within = divmod(micro, self.accumulation)
        h, w = self.shapes[micro % len(self.shapes)]
        places = range(within * self.batch, (within + 1) * self.batch)
        arrays = [self._sample(step * self.accumulation * self.batch + s, h, w) for s in places]
        mean = np.stack(arrays)
        if micro == self.poison:
            mean[0] = np.nan
        moments = {"mean": mean, "logvar": np.full_like(mean, -3.0)}
        return HostBatch(moments, step, np.array(places), tuple(f"{micro}-{s}.png" for s in places))

    @staticmethod
    def _sample(number: int, h: int, w: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(number).standard_normal((h, w, 4)).astype(np.float32)

    def epoch(self, micro: int) -> float:
        return micro / 4


def sections(**changes: dict[str, Any]) -> schema.Config:
    given: dict[str, dict[str, Any]] = {
        "train": {"steps": 8, "precision": "fp32"},
        "lora": {"rank": 2, "alpha": 2.0},
        "optimizer": {"lr": 0.05},
        "checkpoint": {"every": 0},
        "sample": {"every": 0},
    }
    merged = {name: given.get(name, {}) | changes.get(name, {}) for name in {**given, **changes}}
    return schema.Config(**{n: schema.Config.model_fields[n].annotation(**keys) for n, keys in merged.items()})


def steps_of(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").iterdir())
