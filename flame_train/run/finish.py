"""Stage 5, finish: writes the LoRA files with their metadata, and reports all paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flame_train.adapters.attach import Attached
from flame_train.config.keys import keys
from flame_train.config.render import decisive
from flame_train.config.schema import Config
from flame_train.io.runfolder import RunFolder
from flame_train.training.model import Model
from flame_train.training.result import LoraWriter, formats
from flame_train.version import __version__


def lora_writer(config: Config, model: Model, attached: Attached) -> LoraWriter:
    """The writer of the run's LoRA files. Equal runs give equal bytes: no time, no path."""
    names, side = model.lora_names, config.data.resolution
    predicted = {"prediction_type": config.model.prediction} if names.several_predictions else {}
    return LoraWriter(
        attached,
        model.denoiser.component,
        names,
        title=Path(config.output.dir).name or "lora",
        described={"resolution": f"{side}x{side}", **predicted},
        metadata={
            "ss_seed": str(config.train.seed),
            "ss_learning_rate": repr(config.optimizer.lr),
            "ss_sd_model_name": Path(config.model.checkpoint).name,
            "flame_train_version": __version__,
            "flame_train_config": json.dumps(_without_places(config), sort_keys=True, default=list),
        },
    )


def _without_places(config: Config) -> dict[str, Any]:
    """The settings the weights depend on, files and folders by their last name: where they lay is nobody's business."""
    return {path: Path(value).name if keys()[path].place else value for path, value in decisive(config).items()}


def report(folder: RunFolder, output_format: str, last: Mapping[str, Any]) -> dict[str, Any]:
    """Where everything is, for a finished run whose last step had these figures."""
    return {
        "lora": str(folder.lora),
        **{f"lora_{form}": str(folder.lora_beside(form)) for form in formats(output_format)[1:]},
        "steps": folder.step,
        "loss": last.get("loss"),
        "log": str(folder.folder / "log.jsonl"),
        "samples": str(folder.samples) if any(folder.samples.glob("*.png")) else None,
        "checkpoints": str(folder.checkpoints),
    }
