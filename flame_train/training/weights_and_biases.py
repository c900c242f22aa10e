"""Weights & Biases: curves, sample images and the config of a run, sent by its own program.

Nothing is sent but these: no code, no console, no facts about the machine. WANDB_MODE=offline keeps it all in the run
folder, from which `wandb sync` sends it later.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.config.keys import keys
from flame_train.disk.atomic_write import write_atomically

from .trackers import Tracker, curves

_ID: Final = "run-id.txt"


class WeightsAndBiases(Tracker):
    """A run at Weights & Biases. A continued run goes on with the same one."""

    says = "Weights & Biases is"
    extra = "wandb"

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], name: str) -> None:
        """A run with this name.

        Args:
            folder: the run folder, in which `wandb/` is made.
            project: the project's name.
            config: the sections of the config.
            name: the run's name.

        Raises:
            RuntimeError: nobody is logged in: the library would ask, and a run waits for nobody.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        known = wandb.setup().settings  # with what the environment and the user's files say
        if known.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            symlink=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
        )
        (folder / "wandb").mkdir(exist_ok=True)
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder / "wandb" / _ID),
            resume="allow",
            config=_without_folders(config),
            dir=str(folder),
            settings=settings,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        self._run.log(curves(record), step=record["step"])

    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Sample images; those of step 0 come before the first point."""
        import io

        import wandb
        from PIL import Image

        self._run.log(
            {name: wandb.Image(Image.open(io.BytesIO(raw)), caption=name) for name, raw in images.items()}, step=step
        )

    def close(self) -> None:
        """Sends what is left; offline it says nothing of it."""
        self._run.finish(quiet=True)


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values by section and key; files and folders by their last name: where they lie is nobody's business."""
    return {
        f"{section}.{name}": keys()[f"{section}.{name}"].with_places(value, lambda place: Path(place).name)
        for section, values in config.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }


def _run_id(file: Path) -> str:
    """The name by which the service knows the run: made once, and kept in its folder."""
    if not file.exists():
        raw = secrets.token_hex(8).encode()
        write_atomically(file, [raw], len(raw))
    return file.read_text(encoding="ascii").strip()
