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
        prompts: drawn before and after training, with what is taught; a base whose images are noise has none.
        known_prompts: likewise, of what the base knew before.
        seed: of the noise of the first prompt.
        ema_decay: of the moving average that is the result; 0: none.
    """

    base: str
    note: str = "a smoke run: the base model is small and random, so nothing is drawn; this shows that training works"
    repeats: int = 1
    known: int = 0
    prompts: tuple[str, ...] = ()
    known_prompts: tuple[str, ...] = ()
    seed: int = 42
    ema_decay: float = 0.0
    resolution: int = 64
    bucket_step: int = 16
    batch_size: int = 5
    steps: int = 80
    lr: float = 1e-3  # far above the usual one, for so few steps
    targets: tuple[str, ...] = ("attention",)
    loss: LossSection = field(default_factory=LossSection)
