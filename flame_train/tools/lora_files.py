"""LoRA files that a tool reads, makes or converts: whose they are, how one is written, what a person reads of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.adapters import dialects
from flame_train.adapters.dialects import NATIVE, MatchedKey, spellings
from flame_train.adapters.factors import LoraFactors, LoraState
from flame_train.adapters.folding import ALPHA_KEY
from flame_train.adapters.formats import FORMATS, LoraFile, from_file, to_diffusers, to_kohya
from flame_train.adapters.metadata import METADATA_KEY, model_spec, network_metadata, with_hashes
from flame_train.adapters.nearest import Truncated, Truncation
from flame_train.adapters.shared_alpha import for_kohya
from flame_train.disk.preflight import is_same_file, refuse_place, size
from flame_train.errors import ConfigError, ModelFileError, NonFiniteError, counted
from flame_train.io.keymap import Shape
from flame_train.io.lora_names import LoraFamily
from flame_train.io.resolve import Resolved
from flame_train.io.safetensors import MAX_METADATA_VALUE, save_file
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import Identity, could_be, identify, lora_could_be

_OF_NATIVE: Final = (dialects.ALPHA_KEY, dialects.RANK_KEY)  # true of the source's tensors only


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The report of a conversion. `modules`: component -> count. `dropped_metadata`: keys too long to keep."""

    source: Path
    target: Path
    to: str
    dialects: tuple[str, ...]
    modules: dict[str, int]
    tensors: int
    dropped_metadata: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return asdict(self) | {"source": str(self.source), "target": str(self.target)}


def convert(source: Path, target: Path, to: str, force: bool = False, skip_unknown: bool = False) -> ConvertReport:
    """Writes the LoRA `source` to `target` in format `to`; returns what was written, for the report.

    Args:
        to: "kohya" or "diffusers".
        skip_unknown: whether parts of no module are left out.

    Raises:
        ConfigError: an unknown format.
        ModelFileError: a file that is no LoRA of a supported family.
        NonFiniteError: it holds NaN.
        OutputError: the target cannot be written, or exists without `force`.
    """
    source, target = Path(source), Path(target)
    if to not in FORMATS:
        raise ConfigError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}")
    family, lora = read_source(source, target, force, skip_unknown)
    metadata, dropped = split_metadata(lora.metadata)
    if lora.dialects == (NATIVE,):
        metadata = {key: value for key, value in metadata.items() if key not in _OF_NATIVE}
    tensors = write_lora(target, lora.state, family, to, metadata, same_network=True)
    modules = {component: len(layers) for component, layers in lora.state.items()}
    return ConvertReport(source, target, to, lora.dialects, modules, tensors, dropped)


_OF_BASE: Final = ("ss_base_model_version", "ss_v2")  # which tensors do not tell: whether it predicts v
_ABOUT_SCALES: Final = (ALPHA_KEY, METADATA_KEY)  # true of the source's tensors only


def file_and_strength(text: str, usual: float = 1.0) -> tuple[Path, float]:
    """Returns the path and the strength of `FILE` or `FILE:STRENGTH`; `usual` where none is written."""
    path, colon, number = text.rpartition(":")
    try:
        strength = float(number) if colon else usual
    except ValueError:  # a colon of the path
        path, strength = text, usual
    return Path(os.path.expanduser(path if colon else text)), strength


def truncation_of(rank: int | None, error: float | None) -> Truncation:
    """Reads what --rank and --error ask for. Raises ConfigError unless exactly one is given, with a sensible value."""
    if (rank is None) == (error is None):
        raise ConfigError("expected one of --rank N and --error E, " + ("got both" if rank is not None else "got none"))
    if rank is not None:
        if rank < 1:
            raise ConfigError(f"--rank: expected at least 1, got {rank}")
        return Truncation(rank=rank)
    assert error is not None
    if not 1e-6 <= error < 1.0:
        raise ConfigError(f"--error: expected a share of each layer's update from 1e-6 to below 1, got {error:g}")
    return Truncation(error=error)


@dataclass(slots=True)
class Errors:
    """What singular values were left out, over all modules."""

    ranks: Counter[int] = field(default_factory=Counter)
    left_out: float = 0.0
    norm: float = 0.0
    worst: tuple[float, str] = (0.0, "")

    def add(self, module: str, cut: Truncated) -> LoraFactors:
        """Counts a module in and returns its LoRA. Raises NonFiniteError where its number format is too small."""
        for array in (cut.factors.down, cut.factors.up):
            if not np.isfinite(array.astype(np.float32)).all():
                raise NonFiniteError(f"{module}: the values are too large for {array.dtype}; nothing was written")
        self.ranks[cut.factors.rank] += 1
        self.left_out = math.hypot(self.left_out, cut.left_out)
        self.norm = math.hypot(self.norm, cut.norm)
        if cut.left_out:
            self.worst = max(self.worst, (cut.left_out / cut.norm, module))
        return cut.factors

    def as_dict(self) -> dict[str, object]:
        """Gives the report: errors are |update - written| / |update| before rounding to the file's number format."""
        return {
            "ranks": dict(sorted(self.ranks.items())),
            "error": self.left_out / self.norm if self.norm else 0.0,
            "largest_error": self.worst[0],
            "largest_error_in": self.worst[1] or None,
        }


def read_source(source: Path, target: Path, force: bool, skip_unknown: bool = False) -> tuple[LoraFamily, LoraFile]:
    """Returns the LoRA `source`, from which a tool makes the file `target`, and its family.

    Raises ConfigError if both are one file, and OutputError if `target` exists without `force`. Raises ModelFileError
    for a file that is no LoRA of a supported family, and NonFiniteError for NaN.
    """
    if is_same_file(target, source):
        raise ConfigError(f"{target}: source and target are the same file; give another name for the target")
    refuse_place(target, ".safetensors", force)
    family = lora_family(source, require_lora(source))
    lora = from_file(source, family, skip_unknown)
    refuse_non_finite(source, lora.state)
    return family, lora


def same_naming(dialects: Iterable[str]) -> str:
    """Gives the format in which a file of these dialects is written again: diffusers' if all of it is, else kohya's."""
    return "diffusers" if set(dialects) == {"peft"} else "kohya"


def write_lora(
    target: Path,
    state: LoraState,
    family: LoraFamily,
    form: str,
    source_metadata: Mapping[str, str],
    same_network: bool = False,
) -> int:
    """Writes a LoRA's file with its metadata; returns the number of its tensors.

    Args:
        state: the factors by component and module.
        family: how its files name modules.
        form: "kohya" or "diffusers".
        source_metadata: metadata of the file that this one comes from.
        same_network: whether that file's words about kind, rank and alpha still hold.

    Raises:
        ModelFileError: diffusers does not read the kind.
        NonFiniteError: alpha / rank takes a value beyond what a file can hold.
    """
    network = network_metadata(state, family)
    described = network | model_spec(family, target.stem) | {"format": "pt"}
    written = described | {key: value for key, value in source_metadata.items() if key not in _ABOUT_SCALES}
    if not same_network:
        written |= network | {key: source_metadata[key] for key in _OF_BASE if key in source_metadata}
    with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the tensor's name
        if form == "kohya":
            state, record = for_kohya(state, family)
            tensors = to_kohya(state, family)
        else:
            tensors, record = to_diffusers(state, family)
        for name, array in tensors.items():
            if not np.isfinite(array.astype(np.float32)).all():
                raise NonFiniteError(f"{name}: the values are too large for {array.dtype}; nothing was written")
    written |= record
    save_file(target, tensors, with_hashes(tensors, written))
    return len(tensors)


_MUCH: Final = 0.1  # of the update: more is seen in images


def describe_lora(report: Mapping[str, Any]) -> str:
    """Describes a LoRA that `resize`, `extract` or `merge --to lora` made, and its distance from the source."""
    lines = [f"{report['target']}: {size_of(report['target'])}, {_ranks(report['ranks'])}"]
    if source := report.get("source"):
        lines.append(f"before: {source}: {size_of(source)}, {_ranks(report['ranks_before'])}")
    lines += [f"  {lora['lora']}, strength {lora['strength']:g}" for lora in report.get("loras", ())]
    if report["error"]:
        worst = f"worst layer {share(report['largest_error'])}, {report['largest_error_in']}"
        lines.append(f"difference from the original: {share(report['error'])} ({worst})")
        if report["error"] > _MUCH:
            lines.append("that is much: compare images before you delete the original, or keep a higher --rank")
    else:
        lines.append("difference from the original: none but the rounding of the file's numbers")
    if beside := report.get("differences_left_out"):
        lines.append(f"left out: {counted(beside, 'tensor')} that no LoRA can hold")
    return "\n".join([*lines, *_dropped(report.get("dropped_metadata", ()))])


def describe_conversion(report: Mapping[str, Any], readers: Iterable[str]) -> str:
    """Describes a file that `convert` wrote, and which programs take it."""
    modules = ", ".join(f"{count} in {component}" for component, count in report["modules"].items())
    lines = [
        f"{report['target']}: {size_of(report['target'])}, with names of {report['to']}",
        f"before: {report['source']}, with names of {', '.join(report['dialects'])}",
        f"  {counted(report['tensors'], 'tensor')}; layers: {modules}",
        *readers,
    ]
    return "\n".join([*lines, *_dropped(report["dropped_metadata"])])


def describe_merge(report: Mapping[str, Any]) -> str:
    """Describes a checkpoint that `merge` wrote."""
    layers = ", ".join(f"{count} in {component}" for component, count in report["modules"].items())
    lines = [
        f"{report['out']}: {size_of(report['out'])}: {report['base']} with {report['lora']} at strength "
        f"{report['strength']:g}",
        f"  {counted(report['changed_tensors'], 'tensor')} changed; layers: {layers}",
    ]
    for component, count in report["skipped"].items():
        lines.append(f"  passed over: {counted(count, 'layer')} of {component}, which is not in {report['base']}")
    return "\n".join([*lines, *_dropped(report["dropped_metadata"])])


def share(part: float) -> str:
    """Returns a share as per cent, with three digits: 20.6 %."""
    return f"{100 * part:.3g} %"


def size_of(path: str | Path) -> str:
    """Returns the size of a file for a reader."""
    return size(Path(path).stat().st_size)


def _ranks(ranks: Mapping[int, int]) -> str:
    if len(ranks) == 1:
        return f"rank {next(iter(ranks))}"
    return f"ranks {min(ranks)} to {max(ranks)}"


def _dropped(names: Iterable[str]) -> list[str]:
    return [f"left out of the metadata, which would be too long: {', '.join(names)}"] if names else []


def refuse_non_finite(lora: Path, state: LoraState) -> None:
    """Raises NonFiniteError for a LoRA that would spoil whatever it is added to."""
    for component, modules in state.items():
        for module, factors in modules.items():
            arrays = (*factors.arrays.values(), np.float32(factors.alpha))
            if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
                raise NonFiniteError(
                    f"{lora}: its {component} {module} holds NaN or infinity; training it went wrong, or the file is "
                    "damaged: use one of an earlier step, or download it again"
                )


def identify_file(path: Path) -> Identity:
    """Returns the identity of `path`, from headers alone. Raises ModelFileError."""
    with open_weights(path) as weights:
        return identify(weights.shapes, weights.metadata)


def require_lora(path: Path) -> Identity:
    """Returns the identity of a plain LoRA. Raises ModelFileError for any other file, with its identity."""
    identity = identify_file(path)
    if identity.kind != "lora":
        raise ModelFileError(f"{path}: expected a LoRA, but this is: {identity.detail}")
    return identity


def lora_family(path: Path, identity: Identity, base: Identity | None = None) -> LoraFamily:
    """Returns how the LoRA file `path` names modules; where several families would fit, that of the `base` it is for.

    Raises ModelFileError for one that is not supported.
    """
    fitting = [family for family in FAMILIES.values() if lora_could_be(identity.family, family.name)]
    if not fitting:
        raise ModelFileError(f"{path}: {identity.detail}; LoRAs can be converted and merged for {_known()} only")
    for_base = [family for family in fitting if base is not None and could_be(base.family, family.name)]
    with open_weights(path) as weights:
        return (for_base or fitting)[0].lora_names_in(weights.shapes)


def components_of(identity: Identity, shapes: Mapping[str, Shape]) -> tuple[Mapping[str, MatchedKey], str]:
    """Returns the modules of a LoRA by how they are spelled, and the component that is adapted as a rule.

    Both empty for a family that is not supported.
    """
    for family in FAMILIES.values():
        if identity.family != "unknown" and could_be(identity.family, family.name):
            names = family.lora_names_in(shapes)
            return spellings(names), names.components[0].name
    return {}, ""


def resolve_base(path: Path, names: Iterable[str], identity: Identity, family: str) -> Resolved:
    """Returns a base model's tensors by component and native name, `family` being that of the LoRA it is for.

    Raises ModelFileError for a base of another family.
    """
    files = FAMILIES[family].files
    if identity.kind == "text_encoder":
        return files.resolve(names, only=files.alone.get(identity.family, "unknown"))
    if identity.family == "unknown" or not could_be(identity.family, family):
        raise ModelFileError(f"{path}: this is {identity.detail}; LoRAs can be merged into {_known()} only")
    return files.resolve(names, only=None if identity.kind == "checkpoint" else identity.kind)


def _known() -> str:
    return ", ".join(family.title for family in FAMILIES.values())


def split_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the metadata that may be written, and the keys of values that are too long."""
    short = {key: value for key, value in metadata.items() if len(value.encode()) <= MAX_METADATA_VALUE}
    return short, tuple(sorted(metadata.keys() - short.keys()))


def refuse_lost_packing(path: Path, dropped: Collection[str]) -> None:
    """Raises ModelFileError if metadata that say how tensors are packed are left out: they would pass for numbers."""
    if "_quantization_metadata" in dropped:
        raise ModelFileError(f"{path}: its _quantization_metadata are too long to keep; name the denoiser's own file")
