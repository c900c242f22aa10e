"""The results of a run: the LoRA file, and the state from which the run continues to the bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.adapters.attach import Attached
from flame_train.adapters.formats import FORMATS, to_diffusers, to_kohya
from flame_train.adapters.kinds import Factors
from flame_train.adapters.metadata import model_spec, network_metadata, with_hashes
from flame_train.adapters.shared_alpha import for_kohya
from flame_train.disk.open_folder import Location
from flame_train.disk.preflight import reading
from flame_train.engine.dtype import Array, DType, float32
from flame_train.engine.optim import Optimizer
from flame_train.errors import EnvironmentFault, ModelFileError, NonFiniteError, OutputError
from flame_train.io.commit import Checkpoint, Content
from flame_train.io.json_values import whole
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.networks.files.identify import STATE_PREFIXES
from flame_train.version import __version__

_LOG = logging.getLogger(__name__)
_VALUES, _OPTIMIZER = STATE_PREFIXES
STATE_FORMAT = 1
_EARLIER = "earlier_updates"  # left out where there were none
_OF_STANDING = ("loss", "step", "since")
_OF_CODE = ("kind", "name", "sha256")
_EXACT = (".alpha", ".dora_scale", ".lora_magnitude_vector")
_HEADERS = 1 << 16  # bytes: a checkpoint's names and metadata, roughly


def formats(output_format: str) -> tuple[str, ...]:
    """Gives the formats of the result, by `output.format`: the first is the LoRA's file, others are beside it."""
    return FORMATS if output_format == "both" else (output_format,)


@dataclass(frozen=True, slots=True)
class LoraWriter:
    """Writes the adapters as a LoRA file. Equal runs give equal bytes: no time, no path.

    Attributes:
        attached: the adapters.
        place: the component in LoRA files of an adapted layer, and the layer's name in that.
        names: how LoRA files name modules.
        title: the file's title.
        described: what ModelSpec's keys say of the run, and not of the family.
        metadata: what else the file says of the run.
        dtype: what matrices are rounded to, to nearest even. Scales and magnitudes stay in fp32: they are few.
    """

    attached: Attached
    place: Callable[[str], tuple[str, str]]
    names: LoraFamily
    title: str
    described: Mapping[str, str]
    metadata: Mapping[str, str]
    dtype: DType = float32

    def write(self, path: Location, step: int, form: str) -> None:
        """Writes the file in `form`, one of `formats`. Raises `NonFiniteError` rather than write a NaN."""
        state: dict[str, dict[str, Factors]] = {}
        for layer, adapter in self.attached.adapters.items():
            component, name = self.place(layer)
            state.setdefault(component, {})[name] = _finite(layer, adapter.factors())
        metadata = {
            **network_metadata(state, self.names),
            **model_spec(self.names, self.title, self.described),
            "ss_steps": str(step),
            **self.metadata,
        }
        if form == "kohya":
            written, record = for_kohya(state, self.names)
            tensors = to_kohya(written, self.names)
            metadata |= record
        else:
            tensors, record = to_diffusers(state, self.names)
            metadata |= {"format": "pt", **record}
        tensors = {name: self._rounded(name, array) for name, array in tensors.items()}
        save_file(path, tensors, with_hashes(tensors, metadata))

    def _rounded(self, name: str, array: Array) -> Array:
        if not is_rounded(name):
            return array
        with np.errstate(over="ignore"):  # told below
            rounded: Array = array.astype(self.dtype)
        if not np.isfinite(rounded.astype(np.float32)).all():
            raise NonFiniteError(f'{name} is too large for {self.dtype.name}; set output.precision = "bf16"')
        return rounded


def is_rounded(name: str) -> bool:
    """Tells whether a tensor of this name is written in the output's precision; scales and magnitudes are not."""
    return not name.endswith(_EXACT)


def _finite(name: str, factors: Factors) -> Factors:
    if not all(np.isfinite(array).all() for array in factors.arrays.values()):
        raise NonFiniteError(f"the LoRA of {name} holds NaN or infinity; it is not written")
    return factors


@dataclass(frozen=True, slots=True)
class Sources:
    """Hashes of the inputs of a run's weights, settings excepted.

    `image` and `caption` are the networks that encode those, `base` is the base model, `dataset` the dataset. `rounded`
    is of which layers `model.quantize` stores in fewer bits, and how; "" for none. `adapter` is the training adapter,
    or "". `code` has a record of each entry that a script registered; see `config.own_code`.
    """

    image: str
    caption: str
    base: str
    dataset: str
    rounded: str = ""
    adapter: str = ""
    code: tuple[Mapping[str, Any], ...] = ()


_SAID = {
    "image": "with another VAE than model.checkpoint or model.vae holds now; put it back",
    "caption": "with other text encoders than the files under [text_encoders] hold now; put them back",
    "base": "on another base model than model.checkpoint holds now; put it back",
    "adapter": "with another training adapter than model.training_adapter holds now; put it back",
    "dataset": "on other images or captions than there are now; put them back",
    "rounded": "on a base whose layers model.quantize rounded otherwise than this version; take the one that began it",
}
_UNSAID = {
    "rounded": "which layers model.quantize rounded, and how; if the version that wrote it rounded others",
    "adapter": "what was in model.training_adapter; if another file lies there since",
}
"""What a checkpoint of an older version does not say, and when that matters."""


def checkpoint_files(
    optimizer: Optimizer,
    step: int,
    sources: Sources,
    lora: Mapping[str, Content],
    micro_batches: int,
    standing: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Content], int]:
    """Returns the files of a checkpoint, and roughly their bytes.

    The LoRA by its file's name, exact values and moments, and the run's place. A run is continued without the LoRA.

    Args:
        sources: of what the run was made.
        lora: the LoRA's file by its name, and further files.
        micro_batches: how many an update takes, of all processes together.
        standing: how the run's validations stand.
    """
    entries = {f"{_VALUES}{n}": a for n, a in optimizer.arena.state().items()}
    entries |= {f"{_OPTIMIZER}{n}": a for n, a in optimizer.state_dict().items()}
    place = {"format": STATE_FORMAT, "step": step, "version": __version__, **_recorded(sources)}
    place |= {"micro_batches": micro_batches} | ({"validation": dict(standing)} if standing else {})
    place |= {_EARLIER: optimizer.schedule.begins} if optimizer.schedule.begins else {}
    values = sum(a.nbytes for n, a in entries.items() if n.startswith(_VALUES))  # once more as the LoRA
    size = values + sum(a.nbytes for a in entries.values()) + _HEADERS
    files: dict[str, Content] = {
        **lora,
        "optimizer.safetensors": lambda path: save_file(path, entries),
        "state.json": (json.dumps(place, indent=1, sort_keys=True) + "\n").encode(),
    }
    return files, size


def check_sources(checkpoint: Checkpoint, hashes: Mapping[str, Any], changed: Callable[[], str] = str) -> None:
    """Raises `OutputError` if a checkpoint was made from other files: what follows would not continue it.

    Hashes that an older version did not record are not compared.

    Args:
        hashes: those of `Sources` by name, or some of them.
        changed: names the images that are others.
    """
    place = _place(checkpoint)
    for name, said in _SAID.items():
        if name in hashes and place.get(name, hashes[name]) != hashes[name]:
            which = f" ({images})" if name == "dataset" and (images := changed()) else ""
            raise OutputError(
                f"{checkpoint.path}: was trained {said}{which} to continue that run, or set output.dir to "
                "another folder for a new one"
            )


def check_code(checkpoint: Checkpoint, code: Iterable[Mapping[str, Any]], accept: bool) -> None:
    """Raises `OutputError` if a checkpoint was made with other code of a script: what follows would not continue it.

    With `accept` it warns instead. Samplers draw images alone, so they may differ.
    """
    before = {(one["kind"], one["name"]): one for one in _place(checkpoint).get("code", ())}
    for one in code:
        was = before.get((one["kind"], one["name"]))
        if one["kind"] == "sampler" or was is None or was["sha256"] == one["sha256"]:
            continue
        changed = f'{checkpoint.path}: {one["file"]}, which has the {one["kind"]} "{one["name"]}", was another then'
        if accept:
            _LOG.warning("%s; the run goes on with it as it is now", changed)
            continue
        raise OutputError(
            f"{changed}; put it back, set output.dir to another folder for a new run, or go on with it as it is now by "
            "train(..., accept_changed_code=True)"
        )


def knows_sources(checkpoint: Checkpoint, adapter: bool) -> bool:
    """Tells whether a checkpoint identifies its files by their contents, so that they may lie elsewhere now.

    An older version did not record the training `adapter`.
    """
    return _SAID.keys() - {"rounded", *(() if adapter else ("adapter",))} <= _place(checkpoint).keys()


def warn_of_checkpoint(checkpoint: Checkpoint, hashes: Mapping[str, Any]) -> None:
    """Warns of newer checkpoints that are damaged, and of each hash that an older version did not record."""
    warn_of_damaged(checkpoint)
    place = _place(checkpoint)
    for name, what in _UNSAID.items():
        if hashes[name] and name not in place:
            _LOG.warning("%s does not say %s, the base is not the one that the run began with", checkpoint.path, what)


def warn_of_damaged(checkpoint: Checkpoint) -> None:
    """Warns of each newer checkpoint that is damaged."""
    for reason in checkpoint.skipped:
        _LOG.warning("a newer checkpoint is damaged and was passed over: %s", reason)


def micro_batches_of(checkpoint: Checkpoint) -> int | None:
    """Counts the micro-batches of an update, of all processes together; None: an older version's run."""
    return whole(_place(checkpoint).get("micro_batches"))


def standing_of(checkpoint: Checkpoint) -> Any:
    """Returns how the run's validations stood at a checkpoint; None if it says nothing of them."""
    return _place(checkpoint).get("validation")


def restore(checkpoint: Checkpoint, optimizer: Optimizer) -> int:
    """Puts a checkpoint's values and moments back and returns its step. Raises OutputError if they do not fit."""
    entries = _entries(checkpoint)
    try:
        optimizer.arena.load_state(_below(entries, _VALUES))
        optimizer.load_state_dict(_below(entries, _OPTIMIZER))
    except ModelFileError as error:
        raise OutputError(
            f"{checkpoint.path}: is of another run, or of a version that trained other layers; remove this checkpoint "
            f"to continue from the one before, or set output.dir to another folder: {error}"
        ) from error
    return checkpoint.step


def earlier_updates(checkpoint: Checkpoint) -> int:
    """Returns the updates that the optimizer of a checkpoint's run had done when the run began; 0 for most runs."""
    return whole(_place(checkpoint).get(_EARLIER)) or 0


def updates_done(checkpoint: Checkpoint) -> int:
    """Returns the updates that a checkpoint's optimizer has done, in this run and in those that it continues."""
    return int(_entries(checkpoint, f"{_OPTIMIZER}count")[f"{_OPTIMIZER}count"])


def value_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each trained matrix of a checkpoint, by name."""
    with _state_file(checkpoint) as file:
        return _below(file.shapes, _VALUES)


def carry_over(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Gives a fresh optimizer the values of another run's checkpoint, its rule's state and its count of updates.

    A moving average goes on too; where that run had none it begins with the values. The rate, what is done to
    gradients before the rule, the loss scale and the count of skipped steps are those of the fresh optimizer.
    Raises ModelFileError for the state of another rule.
    """
    entries = _entries(checkpoint)
    there, values = _below(entries, _OPTIMIZER), _below(entries, _VALUES)
    optimizer.arena.load_state(values)
    fresh = optimizer.state_dict()
    rule, average = f"{optimizer.transforms[-1].name}.", "average.values."
    values_kept = {n: a for n, a in fresh.items() if not n.startswith(rule) and n != "count"}
    values_kept |= {n: there.get(n, values[n.removeprefix(average)]) for n in values_kept if n.startswith(average)}
    optimizer.load_state_dict(values_kept | {n: a for n, a in there.items() if n.startswith(rule) or n == "count"})


def _entries(checkpoint: Checkpoint, *names: str) -> dict[str, Any]:
    with _state_file(checkpoint) as file:
        return {name: np.array(file.read(name)) for name in names or file.names}


@contextmanager
def _state_file(checkpoint: Checkpoint) -> Iterator[SafetensorsFile]:
    try:
        with SafetensorsFile(checkpoint.path / "optimizer.safetensors") as file:
            yield file
    except (ModelFileError, EnvironmentFault) as error:  # its hash fitted a moment ago: it is out of reach now
        raise OutputError(str(error)) from error


def _place(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns where in the run a checkpoint was made. Raises `OutputError` for one of a newer version, or edited."""
    with reading(checkpoint.path / "state.json"):
        raw = (checkpoint.path / "state.json").read_bytes()
    try:
        place: Mapping[str, Any] = json.loads(raw)
        form, version, step = place["format"], place["version"], place.get("step")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _foreign(checkpoint) from None
    if form != STATE_FORMAT:
        raise OutputError(
            f"{checkpoint.path}: written by flame-train {version} (state format {form}, this version reads "
            f"{STATE_FORMAT}); continue the run with that version"
        )
    if step != checkpoint.step or not _is_written(place):
        raise _foreign(checkpoint)
    return place


def _is_written(place: Mapping[str, Any]) -> bool:
    """Tells whether what a run computes with is of the kinds that any version writes."""
    standing, code = place.get("validation", {}), place.get("code", [])
    return (
        bool(whole(place.get("micro_batches", 1)))
        and whole(place.get(_EARLIER, 0)) is not None
        and isinstance(standing, dict)
        and all(standing.get(name) is None or type(standing[name]) in (int, float) for name in _OF_STANDING)
        and isinstance(code, list)
        and all(isinstance(one, dict) and all(isinstance(one.get(key), str) for key in _OF_CODE) for one in code)
    )


def _recorded(sources: Sources) -> dict[str, Any]:
    """Returns the sources as state.json has them; a run without an adapter or code of a script says nothing of it."""
    return {name: value for name, value in asdict(sources).items() if value or name not in ("adapter", "code")}


def _foreign(checkpoint: Checkpoint) -> OutputError:
    return OutputError(
        f"{checkpoint.path}: its state.json is not what flame-train wrote for step {checkpoint.step}; put it back, or "
        "remove this checkpoint to continue from the one before"
    )


def _below(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in entries.items() if name.startswith(prefix)}
