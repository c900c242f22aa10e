"""The lesson of a quickstart: what a small base model learns, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from flame_train.config.schema import LossSection


@dataclass(frozen=True, slots=True)
class Lesson:
    """How a small base is taught: by which data, and by which settings.

    Attributes:
        base: what the base model is, in a few words.
        note: what the result shows, and what not.
        repeats: how often the new images come in an epoch.
        known: how many images of what the base knows are shown beside them, so that it keeps that.
    """

    base: str
    note: str = "the base model is small and random: this shows that training works, and its images are noise"
    repeats: int = 1
    known: int = 0
    resolution: int = 64
    bucket_step: int = 16
    batch_size: int = 5
    steps: int = 80
    lr: float = 1e-3  # far above the usual one, for so few steps
    targets: tuple[str, ...] = ("attention",)
    loss: LossSection = field(default_factory=LossSection)
