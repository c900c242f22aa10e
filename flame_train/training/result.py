"""What a run leaves: the LoRA file, and the state from which it can be continued to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flame_train import __version__
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import FORMATS, to_diffusers, to_kohya
from flame_train.adapters.lora import Attached
from flame_train.adapters.metadata import model_spec, network_metadata, with_hashes
from flame_train.config.keys import keys
from flame_train.config.render import decisive
from flame_train.config.schema import Config
from flame_train.engine.optim import Optimizer
from flame_train.errors import ModelFileError, NonFiniteError, OutputError
from flame_train.io.commit import Content, Found
from flame_train.io.files import reading
from flame_train.io.held import Place
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.identify import STATE_PREFIXES

_VALUES, _OPTIMIZER = STATE_PREFIXES
STATE_FORMAT = 1
_HEADERS = 1 << 16  # bytes: a checkpoint's names and metadata, roughly


def formats(config: Config) -> tuple[str, ...]:
    """What the result is written in: the first as lora.safetensors, others beside it."""
    return FORMATS if config.output.format == "both" else (config.output.format,)


def write_lora(
    path: Place, attached: Attached, component: str, names: LoraFamily, config: Config, step: int, form: str
) -> None:  # fmt: skip
    """The adapters as a LoRA file in `form`, one of `formats`. Equal runs give equal bytes: no time, no path.

    Raises `NonFiniteError` rather than write a NaN.
    """
    factors = {name: _factors(name, a.down.numpy(), a.up.numpy(), a.alpha) for name, a in attached.adapters.items()}
    state = {component: factors}
    metadata = {
        **network_metadata(state, names),
        **model_spec(names, Path(config.output.dir).name or "lora", _trained_as(config, names)),
        "ss_steps": str(step),
        "ss_seed": str(config.train.seed),
        "ss_learning_rate": repr(config.optimizer.lr),
        "ss_sd_model_name": Path(config.model.checkpoint).name,
        "flame_train_version": __version__,
        "flame_train_config": json.dumps(_without_places(config), sort_keys=True, default=list),
    }
    if form == "kohya":
        tensors = to_kohya(state, names)
    else:
        tensors, record = to_diffusers(state, names)
        metadata |= {"format": "pt", **record}
    save_file(path, tensors, with_hashes(tensors, metadata))


def _trained_as(config: Config, names: LoraFamily) -> dict[str, str]:
    """What a file's description says of the run and not of the family."""
    side = config.data.resolution
    predicted = {"prediction_type": config.model.prediction} if names.several_predictions else {}
    return {"resolution": f"{side}x{side}", **predicted}


def _without_places(config: Config) -> dict[str, Any]:
    """The settings the weights depend on, files and folders by their last name: where they lay is nobody's business."""
    return {path: Path(value).name if keys()[path].place else value for path, value in decisive(config).items()}


def _factors(name: str, down: np.ndarray[Any, Any], up: np.ndarray[Any, Any], alpha: float) -> LoraFactors:
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise NonFiniteError(f"the LoRA of {name} holds NaN or infinity; it is not written")
    return LoraFactors(down, up, alpha)


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run's weights follow from beside its settings, as hashes.

    `picture` and `caption` are the networks that encode those, `base` the base model, `dataset` what is trained on.
    """

    picture: str
    caption: str
    base: str
    dataset: str


_SAID = {
    "picture": "with another VAE than model.checkpoint or model.vae holds now; put it back",
    "caption": "with other text encoders than the files under [model] hold now; put them back",
    "base": "on another base model than model.checkpoint holds now; put it back",
    "dataset": "on other pictures or captions than data.path holds now; put them back",
}


def checkpoint_files(
    optimizer: Optimizer, step: int, sources: Sources, write: Content
) -> tuple[dict[str, Content], int]:  # fmt: skip
    """What a checkpoint consists of, and about how many bytes it takes.

    The LoRA as `write` writes it, exact values and moments, and the run's place.
    """
    entries = {f"{_VALUES}{n}": a for n, a in optimizer.arena.state().items()}
    entries |= {f"{_OPTIMIZER}{n}": a for n, a in optimizer.state_dict().items()}
    place = {"format": STATE_FORMAT, "step": step, "version": __version__, **asdict(sources)}
    values = sum(a.nbytes for n, a in entries.items() if n.startswith(_VALUES))  # once more as the LoRA
    size = values + sum(a.nbytes for a in entries.values()) + _HEADERS
    files: dict[str, Content] = {
        "lora.safetensors": write,
        "optimizer.safetensors": lambda path: save_file(path, entries),
        "state.json": (json.dumps(place, indent=1, sort_keys=True) + "\n").encode(),
    }
    return files, size


def check_sources(found: Found, sources: Sources) -> None:
    """Raises `OutputError` if a checkpoint was made from other files: what follows would not continue it.

    What an older version did not record is not compared.
    """
    place = _place(found)
    for name, now in asdict(sources).items():
        if place.get(name, now) != now:
            raise OutputError(
                f"{found.path}: was trained {_SAID[name]} to continue that run, or set output.dir to another folder "
                "for a new one"
            )


def knows_sources(found: Found) -> bool:
    """Whether a checkpoint tells its files by what is in them, so that they may lie elsewhere now."""
    return _SAID.keys() <= _place(found).keys()


def restore(found: Found, optimizer: Optimizer) -> int:
    """Puts a checkpoint's values and moments back and returns its step."""
    try:
        with SafetensorsFile(found.path / "optimizer.safetensors") as file:
            entries = {name: np.array(file.read(name)) for name in file.names}
    except ModelFileError as error:  # its hash fitted a moment ago: it is out of reach now
        raise OutputError(str(error)) from error
    optimizer.arena.load_state(_below(entries, _VALUES))
    optimizer.load_state_dict(_below(entries, _OPTIMIZER))
    return found.step


def _place(found: Found) -> Mapping[str, Any]:
    """Where in the run a checkpoint was made. Raises `OutputError` for one of a newer version, or edited."""
    with reading(found.path / "state.json"):
        raw = (found.path / "state.json").read_bytes()
    try:
        place: Mapping[str, Any] = json.loads(raw)
        form, version, step = place["format"], place["version"], place.get("step")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _foreign(found) from None
    if form != STATE_FORMAT:
        raise OutputError(
            f"{found.path}: written by flame-train {version} (state format {form}, this version reads {STATE_FORMAT}); "
            "continue the run with that version"
        )
    if step != found.step:
        raise _foreign(found)
    return place


def _foreign(found: Found) -> OutputError:
    return OutputError(
        f"{found.path}: its state.json is not what flame-train wrote for step {found.step}; put it back, or remove "
        "this checkpoint to continue from the one before"
    )


def _below(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in entries.items() if name.startswith(prefix)}
