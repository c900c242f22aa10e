"""`flame-train inspect`: describes a safetensors file by its header and a LoRA's alphas."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.adapters.dialects import split_key
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import ADAPTERS
from flame_train.errors import ModelFileError, shown
from flame_train.families import licence_of, published_terms, told_terms
from flame_train.io.dtypes import Array
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import Identity, identify
from flame_train.tools.lora_files import components_of, lora_family

_BEFORE_TARGET: Final = re.compile(r"\A.*(blocks?|layers)[._](image(_cond)?[._])?\d+[._](\d+[._])?", re.DOTALL)
_COMPONENTS: Final = (
    (re.compile(r"lora_te2_|text_encoder_2\.|text_encoders\.clip_g\."), "text_encoder_2"),
    (re.compile(r"lora_te3_|text_encoder_3\.|text_encoders\.t5xxl\."), "text_encoder_3"),
    (re.compile(r"lora_te1?_|text_encoder\.|text_encoders\.clip_l\."), "text_encoder"),
    (re.compile(r"transformer\."), "transformer"),
)
_INNER: Final = tuple(slot for kind in ADAPTERS.values() for slot in kind.files.inner)
_LONGEST_VALUE: Final = 100


@dataclass(frozen=True, slots=True)
class LoraSummary:
    """A LoRA's make-up: modules per component, per rank, per alpha, and per kind of target.

    `refused` is why `convert`, `merge` and `sample` would not read the file; empty where they would.
    """

    modules: dict[str, int]
    ranks: dict[int, int]
    alphas: dict[float, int]
    targets: dict[str, int]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class DtypeSummary:
    """How much of a file is stored in one dtype."""

    tensors: int
    parameters: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """A description. `lora` is None for anything but an adapter; `identity.parts` are a model's components.

    `licence` is what is known of a model's terms; empty of what is none.
    """

    path: Path
    identity: Identity
    tensors: int
    parameters: int
    nbytes: int
    dtypes: dict[str, DtypeSummary]
    lora: LoraSummary | None
    metadata: dict[str, str]
    licence: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return asdict(self) | {"path": str(self.path)}


def inspect_file(path: Path) -> InspectReport:
    """Describes the file, or the folder of files, at `path`. Raises ModelFileError if it cannot be read at all."""
    path = Path(path)
    with open_weights(path) as weights:
        shapes = weights.shapes
        identity = identify(shapes, weights.metadata)
        return InspectReport(
            path=path,
            identity=identity,
            tensors=len(shapes),
            parameters=sum(math.prod(shape) for shape in shapes.values()),
            nbytes=sum(weights.info(name).nbytes for name in shapes),
            dtypes=_dtypes(weights),
            lora=_lora(weights, identity) if identity.kind in ("lora", "adapter") else None,
            metadata=dict(weights.metadata),
            licence=_licence(identity, path),
        )


def render(report: InspectReport) -> str:
    """Returns the report for a reader. Metadata is shortened, and what could steer a terminal is written as escapes."""
    lines = [
        f"{report.path}",
        f"  {report.identity.detail}",
        f"  {report.tensors} tensors, {report.parameters:,} parameters, {report.nbytes:,} bytes",
    ]
    if report.licence:
        lines.append(f"  licence: {report.licence}")
    for tag, count in report.dtypes.items():
        lines.append(f"  {tag}: {count.tensors} tensors, {count.parameters:,} parameters")
    if report.lora is not None:
        lines.append(f"  modules: {_counted(report.lora.modules)}")
        lines.append(f"  rank: {_counted(report.lora.ranks)}")
        lines.append(f"  alpha: {_counted(report.lora.alphas) or 'not stored (taken to be the rank)'}")
        lines.append(f"  targets: {_counted(report.lora.targets)}")
        if report.lora.refused:
            reason = " / ".join(map(_printable, report.lora.refused.splitlines()))
            lines.append(f"  not read by convert, merge and sample: {reason}")
    if report.metadata:
        lines.append(f"  metadata, {len(report.metadata)} keys:")
        lines += [f"    {_printable(key)}: {_printable(value)}" for key, value in sorted(report.metadata.items())]
    return "\n".join(lines)


def _licence(identity: Identity, path: Path) -> str:
    known_family = FAMILIES.get(identity.family)
    is_model = known_family is not None and identity.kind in ("checkpoint", known_family.denoiser)
    if not is_model:
        return ""
    known = licence_of(identity.family, path.as_posix())
    return told_terms(known) + ("" if known else f"; {published_terms(identity.family)}")


def _dtypes(weights: Weights) -> dict[str, DtypeSummary]:
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for name in weights.names:
        info = weights.info(name)
        tensors[info.dtype] += 1
        parameters[info.dtype] += math.prod(info.shape)
    return {tag: DtypeSummary(count, parameters[tag]) for tag, count in tensors.most_common()}


def _lora(weights: Weights, identity: Identity) -> LoraSummary:
    places, usual = components_of(identity, weights.shapes)
    modules: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    alphas: Counter[float] = Counter()
    targets: Counter[str] = Counter()
    shapes_of: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in weights.names:
        module, slot = split_key(name) or ("", "")
        shape = weights.info(name).shape
        if slot == "alpha" and math.prod(shape) == 1:
            alphas[_number(weights.read(name))] += 1
        elif slot:
            shapes_of.setdefault(module, {})[slot] = shape
    read, refused = _as_read(weights, identity)
    if not alphas and any(factors.alpha != factors.rank for factors in read):
        alphas.update(factors.alpha for factors in read)
    for module, shapes in shapes_of.items():
        modules[places[module].component if module in places else _component(module, usual)] += 1
        targets[_target(module)] += 1
        ranks.update([shapes[slot][0] for slot in _INNER if shapes.get(slot)][:1])
    return LoraSummary(
        modules=dict(modules.most_common()),
        ranks=dict(ranks.most_common()),
        alphas=dict(alphas.most_common()),
        targets=dict(targets.most_common()),
        refused=refused,
    )


def _as_read(weights: Weights, identity: Identity) -> tuple[list[LoraFactors], str]:
    """Returns the pairs of matrices of a LoRA as `convert` reads them, or why it does not."""
    if identity.kind != "lora":
        return [], ""  # `identity` says why
    try:
        path = Path(weights.path)
        state = from_file(path, lora_family(path, identity)).state
    except ModelFileError as error:
        return [], str(error).removeprefix(f"{weights.path}: ")
    every = [factors for modules in state.values() for factors in modules.values()]
    return [factors for factors in every if isinstance(factors, LoraFactors)], ""


def _number(alpha: Array) -> float:
    """Gives NaN for a value that is no real number."""
    return math.nan if alpha.dtype.kind == "c" else float(alpha.reshape(()))


def _component(module: str, usual: str) -> str:
    """Finds the component by the beginning of a name, for a module that no supported family has."""
    return next((name for pattern, name in _COMPONENTS if pattern.match(module)), usual or "unet")


def _target(module: str) -> str:
    """Returns the module's path inside its block: `attn1.to_q`; flattened paths keep their underscores."""
    return _BEFORE_TARGET.sub("", module)


def _counted(counts: Mapping[Any, int]) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))} ({next(iter(counts.values()))})"
    return ", ".join(f"{what} ({count})" for what, count in counts.items())


def _printable(text: str) -> str:
    clean = shown(text)
    return clean if len(clean) <= _LONGEST_VALUE else f"{clean[:_LONGEST_VALUE]}... ({len(text)} characters)"
