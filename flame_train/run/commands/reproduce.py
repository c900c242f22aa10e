"""`flame-train reproduce`: how a config differs from the one of a LoRA file, and the same bytes trained again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.adapters.attach import Attached
from flame_train.adapters.metadata import model_spec
from flame_train.config.compatibility import table
from flame_train.config.load import load_located
from flame_train.config.located import ConfigWithSource
from flame_train.errors import ConfigError, DataError, ModelFileError, OutputError
from flame_train.io.hub import fetching
from flame_train.io.json_values import json_tree
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.check.check_run import check
from flame_train.run.finish.finish import lora_writer
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.run.plan.start import checkpoint_here, run_folder
from flame_train.training.result import formats, is_rounded
from flame_train.training.session import Session

from .stages import check_device, train_plan

_CONFIG: Final = "flame_train_config"
_DATASET: Final = "flame_train_dataset_hash"
_OWN: Final = (_CONFIG, f"{_CONFIG}_hash", _DATASET)
_PRECISIONS: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_STEPS: Final = re.compile(r"[0-9]{1,18}")
_LONGEST: Final = 60  # characters of a value that is shown


@dataclass(frozen=True, slots=True)
class Written:
    """What a LoRA file says of its run.

    Attributes:
        path: the file.
        metadata: its metadata.
        settings: the settings that its weights depend on, by path.
        form: "kohya" or "diffusers".
        precision: the number format of its matrices.
    """

    path: Path
    metadata: Mapping[str, str]
    settings: Mapping[str, Any]
    form: str
    precision: str

    @classmethod
    def read(cls, path: Path) -> Written:
        """Raises ModelFileError for a file that this program did not write, or whose settings were edited."""
        with SafetensorsFile(path) as file:
            metadata = dict(file.metadata)
            tags = {file.info(name).dtype for name in file.names if is_rounded(name)}
        settings = metadata.get(_CONFIG)
        if settings is None or _DATASET not in metadata:
            raise ModelFileError(
                f"{path}: expected a LoRA that flame-train trained, got one without {_CONFIG} in its metadata; "
                "name the file as a run wrote it, not one that was converted, merged or resized"
            )
        if hashlib.sha256(settings.encode()).hexdigest() != metadata.get(f"{_CONFIG}_hash"):
            raise ModelFileError(
                f"{path}: its {_CONFIG} is not what its {_CONFIG}_hash says; it was edited, so use the run's own file"
            )
        tree = json_tree(settings)
        if not isinstance(tree, dict) or not _STEPS.fullmatch(metadata.get("ss_steps", "0")):
            raise ModelFileError(
                f"{path}: its {_CONFIG} or its ss_steps is not what flame-train writes; use the run's own file"
            )
        form = "diffusers" if metadata.get("format") == "pt" else "kohya"
        return cls(path, metadata, tree, form, _PRECISIONS.get(tags.pop(), "") if len(tags) == 1 else "")


def reproduce(
    file: Path, source: str, overrides: Sequence[str], output: Path, device: str, dry_run: bool
) -> dict[str, Any]:
    """Trains the run of a LoRA file again and compares the bytes.

    Args:
        source, overrides: the config that is said to be the file's, as in `train`.
        output: the run is made in the folder below it that has the name of `output.dir`, which the file's title may be.
        dry_run: whether it only says what differs.

    Returns:
        The two files and their hash, for the report.

    Raises:
        ConfigError: settings differ, and which.
        DataError: the settings are the same, and the images or captions are others.
        OutputError: the folder holds this run already, finished.
        ModelFileError: the file says too little, or the bytes came out otherwise, and how.
    """
    written, read_config, session = Written.read(file), load_located(source, overrides), Session(device)
    folder = output / Path(read_config.config.output.dir).name
    moved = read_config.config.output.model_copy(update={"dir": str(folder)})
    config_source = ConfigWithSource(read_config.config.model_copy(update={"output": moved}), read_config.layered)
    with session.stop, fetching("headers" if dry_run else "all"):
        if not dry_run:
            check_device(config_source.config, device)
        plan = make_plan(check(config_source), session.stop)
        refuse_differences(written, plan)
        if dry_run:
            return {"lora": str(file), "differences": 0, "steps": plan.config.train.steps}
        checkpoint = checkpoint_here(plan, run_folder(plan))
        if checkpoint is not None and checkpoint.step >= plan.config.train.steps:
            raise OutputError(f"{folder}: holds the finished run already; remove it, or choose another --output")
        done = train_plan(plan, session)
    lora = Path(done["lora"] if written.form == formats(plan.config.output.format)[0] else done[f"lora_{written.form}"])
    if (difference := lora_difference(file, lora)) is not None:
        raise ModelFileError(
            f"{lora}: was trained by the settings and the dataset of {file}, and is another: {difference}. The same "
            "device, libraries and base model give the same bytes"
        )
    return {
        "lora": str(file),
        "reproduced": str(lora),
        "steps": done["steps"],
        "sha256": hashlib.sha256(lora.read_bytes()).hexdigest(),
    }


def refuse_differences(written: Written, plan: Plan) -> None:
    """Raises ConfigError, or DataError where the dataset alone differs, with a table of what does."""
    c = plan.config
    untrained = Attached(plan.model.network, {})
    writer = lora_writer(c, plan.model, untrained, plan.samples, plan.order.batches_per_epoch)
    now = {**writer.metadata, **model_spec(writer.names, writer.title, writer.described)}
    before, settings = written.settings, json.loads(now[_CONFIG])
    rows = [(path, before.get(path), settings.get(path)) for path in {**settings, **before}]
    outputs = formats(c.output.format)
    rows += [
        ("train.steps", int(written.metadata.get("ss_steps", 0)), c.train.steps),
        ("output.precision", written.precision or c.output.precision, c.output.precision),
        ("output.format", written.form if written.form not in outputs else c.output.format, c.output.format),
    ]
    rows = list({row[0]: row for row in rows if row[1] != row[2]}.values())
    if not rows:  # else they follow from the settings
        differing = {key: (written.metadata.get(key), value) for key, value in now.items() if key not in _OWN}
        rows += [(key, was, value) for key, (was, value) in differing.items() if was != value]
    other_data = written.metadata[_DATASET] != now[_DATASET]
    key, places = ("data.sets", [one.path for one in c.data.sets]) if c.data.sets else ("data.path", [c.data.path])
    data = f"its images or captions are not those of {key}: {', '.join(places)}"
    if rows:
        listing = table([(path, _short(was), _short(value)) for path, was, value in rows], "the file")
        more = f"\n{data}" if other_data else ""
        raise ConfigError(f"{written.path}: was trained with other settings than this config's:\n{listing}{more}")
    if other_data:
        raise DataError(f"{written.path}: {data}; put back those it was trained on")


def lora_difference(file: Path, other: Path) -> str | None:
    """Says how two LoRA files differ; None if they have the same bytes."""
    if file.read_bytes() == other.read_bytes():
        return None
    with SafetensorsFile(file) as a, SafetensorsFile(other) as b:
        if a.shapes != b.shapes:
            return "it has other tensors"
        far = {name: _distance(a.read(name), b.read(name)) for name in a.names}
        keys = sorted(k for k in {**a.metadata, **b.metadata} if a.metadata.get(k) != b.metadata.get(k))
    others = {name: distance for name, distance in far.items() if distance}
    if not others:
        return f"its metadata differ in {', '.join(keys) or 'their order'}"
    worst = max(others, key=lambda name: others[name])
    return f"{len(others)} of {len(far)} tensors differ, {worst} by {others[worst]:.1e} of its norm"


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Returns the norm of the difference as a share of that of `a`; above 0 wherever a bit differs."""
    if a.tobytes() == b.tobytes():
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(x)), 1e-300)) or 1e-300


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
