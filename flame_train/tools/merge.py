"""`flame-train merge`: bakes a LoRA into a base model, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flame_train.adapters.factors import LoraState
from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import Factors
from flame_train.adapters.metadata import MERGED_KEY
from flame_train.disk.preflight import is_same_file, refuse_place
from flame_train.errors import ConfigError, ModelFileError, NonFiniteError
from flame_train.io.dtypes import DTYPE_OF_TAG, FLOAT_TAGS, Array
from flame_train.io.header import TensorInfo
from flame_train.io.keymap import Op, Shape, Source
from flame_train.io.resolve import Resolved
from flame_train.io.safetensors import save_stream
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.identify import Identity, identify, lora_could_be
from flame_train.progress import progress
from flame_train.tools.lora_files import (
    lora_family,
    refuse_lost_packing,
    refuse_non_finite,
    require_lora,
    resolve_base,
    split_metadata,
)
from flame_train.training.session import StopRequest

Counts = dict[str, int]
"""Component -> number of modules."""


class MergeReport(NamedTuple):
    """What was merged."""

    base: Path
    lora: Path
    out: Path
    strength: float
    modules: Counts
    skipped: Counts
    """Those of components that the base lacks."""
    changed_tensors: int
    dropped_metadata: tuple[str, ...]
    """Keys of the base's metadata that no longer hold."""

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return self._asdict() | {"base": str(self.base), "lora": str(self.lora), "out": str(self.out)}


@dataclass(frozen=True, slots=True)
class _Patch:
    """One module's update, and where its weight is stored."""

    source: Source
    factors: Factors


def merge(
    base: Path, lora: Path, out: Path, strength: float = 1.0, force: bool = False, skip_unknown: bool = False
) -> MergeReport:
    """Writes `base` with W + strength * (alpha / rank) * up @ down for every module of `lora`; returns the report.

    The sums are in fp32 and rounded once. One tensor at a time is in memory. Weights that are packed stay as they are.

    Args:
        base: a single file, or the folder of one component.
        lora: the LoRA's file.
        out: the file to write, in the base's own layout, names and dtypes.
        skip_unknown: whether parts of the LoRA of no module are left out.

    Raises:
        ModelFileError: the two files do not belong together, the base holds NaN, or its packed weights are wanted.
        NonFiniteError: the LoRA holds NaN, or a sum overflows the stored dtype.
        OutputError: `out` exists and `force` is false.
        Interrupted: a signal came.
    """
    base, lora, out = Path(base), Path(lora), Path(out)
    _check_call(base, lora, out, strength, force)
    with StopRequest() as stop, open_weights(base) as weights, open_weights(base, as_stored=True) as stored:
        identity = identify(weights.shapes, weights.metadata)
        _check_base(base, weights, identity)
        family = lora_family(lora, _matching(lora, base, identity), identity)
        resolved = resolve_base(base, weights.names, identity, family.name)
        state = from_file(lora, family, skip_unknown).state
        refuse_non_finite(lora, state)
        present = {part: modules for part, modules in state.items() if part in resolved.sources}
        patches = _patches(lora, base, present, resolved, weights)
        infos = [stored.info(name) for name in stored.names]
        _refuse_other_packing(base, infos)
        metadata, dropped = split_metadata(weights.metadata)
        refuse_lost_packing(base, dropped)
        metadata.pop("modelspec.hash_sha256", None)  # no longer true
        metadata[MERGED_KEY] = _history(metadata, lora, strength)
        used = frozenset(name for sources in resolved.sources.values() for s in sources.values() for name in s.names)
        with progress(f"merging into {out.name}", len(infos)) as advance:
            merging = _Merging(base, stored, weights.shapes, patches, used, strength, stop, advance)
            save_stream(out, infos, merging.read, metadata)
    merged = {part: len(modules) for part, modules in present.items()}
    skipped = {part: len(modules) for part, modules in state.items() if part not in present}
    return MergeReport(base, lora, out, strength, merged, skipped, len(patches), dropped)


def _refuse_other_packing(base: Path, infos: Iterable[TensorInfo]) -> None:
    """Raises ModelFileError for a tensor that safetensors files cannot hold as it is, as blocks of GGUF are."""
    for info in infos:
        if info.dtype not in DTYPE_OF_TAG:
            raise ModelFileError(
                f"{base}: {info.name} is stored as {info.dtype}, which the result cannot hold; name the model's file "
                "in 16 bits instead"
            )


def _check_call(base: Path, lora: Path, out: Path, strength: float, force: bool) -> None:
    if not np.isfinite(strength):
        raise ConfigError(f"strength must be a finite number, got {strength}")
    for other in (base, lora):
        if is_same_file(out, other):
            raise ConfigError(f"{out}: would overwrite {other}; give another name for the result")
    refuse_place(out, ".safetensors", force)


def _check_base(base: Path, weights: Weights, identity: Identity) -> None:
    if identity.kind in ("lora", "adapter"):
        raise ModelFileError(f"{base}: expected a base model, but this is: {identity.detail}. Swap the two files?")
    if any("/" in name for name in weights.names):
        denoiser = next((part for part in identity.parts if part in ("unet", "transformer")), "unet")
        raise ModelFileError(
            f"{base}: is a whole diffusers folder; name one component of it, such as {base}/{denoiser}"
        )


def _matching(lora: Path, base: Path, base_identity: Identity) -> Identity:
    identity = require_lora(lora)
    if base_identity.kind != "text_encoder" and not lora_could_be(identity.family, base_identity.family):
        raise ModelFileError(f"{lora}: is a {identity.detail}, but {base} is {base_identity.detail}")
    return identity


def _patches(lora: Path, base: Path, state: LoraState, resolved: Resolved, weights: Weights) -> dict[str, list[_Patch]]:
    """Finds the stored tensor of each module of a LoRA. Raises ModelFileError for every module without one."""
    shapes = weights.shapes
    patches: dict[str, list[_Patch]] = {}
    faults: list[str] = []
    for component, modules in state.items():
        sources = resolved.sources[component]
        for module, factors in modules.items():
            source = sources.get(f"{module}.weight")
            if source is None:
                near = get_close_matches(f"{module}.weight", sources, n=1)
                faults.append(f"{component} {module} is not in the base" + (f" (nearest: {near[0]})" if near else ""))
                continue
            misfit = _misfit(source, factors, weights, shapes)
            if misfit:
                faults.append(f"{component} {module} is {misfit}")
                continue
            for name in source.names:
                patches.setdefault(name, []).append(_Patch(source, factors))
    if faults:
        lines = "\n  ".join(faults[:5])
        raise ModelFileError(f"{lora}: {len(faults)} of its modules do not fit {base}; nothing was written:\n  {lines}")
    if not patches:
        raise ModelFileError(f"{lora}: has no module for any component in {base}; nothing to merge")
    return patches


def _misfit(source: Source, factors: Factors, weights: Weights, shapes: Mapping[str, Shape]) -> str:
    """Returns the reason why a weight cannot take its update; "" if it can."""
    if source.op is Op.SCALE:
        return "stored as scaled fp8, which cannot be merged into"
    quantised = {weights.info(name).dtype for name in source.names} - FLOAT_TAGS
    if quantised:
        return f"stored as {', '.join(quantised)}, quantised by another program, which cannot be merged into"
    shape = source.made_shape(shapes)
    if shape is None or not factors.fits(shape):
        return f"{factors.weight_shape} in the LoRA, {shape} in the base"
    return ""


def _history(metadata: Mapping[str, str], lora: Path, strength: float) -> str:
    """Returns the LoRAs baked in so far, this one last, as JSON."""
    try:
        before = json.loads(metadata.get(MERGED_KEY, "[]"))
    except ValueError:
        before = []
    entries = before if isinstance(before, list) else []
    return json.dumps([*entries, {"lora": lora.name, "strength": strength}], sort_keys=True)


@dataclass(frozen=True, slots=True)
class _Merging:
    """The base's tensors, each updated as it is read; what no network has passes as it is: schedules hold infinity."""

    base: Path
    weights: Weights
    shapes: Mapping[str, Shape]
    patches: Mapping[str, list[_Patch]]
    used: frozenset[str]
    strength: float
    stop: StopRequest
    advance: Callable[[float], None]

    def read(self, name: str) -> Array:
        self.stop.check("while merging; nothing was written")
        self.advance(1)
        stored = self.weights.read(name)
        if name in self.used and not np.isfinite(stored).all():
            raise ModelFileError(
                f"{self.base}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run: get "
                "another copy. Nothing was written"
            )
        patches = self.patches.get(name)
        if patches is None:
            return stored
        total = stored.astype(np.promote_types(stored.dtype, np.float32), order="C")
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the tensor's name
            for patch in patches:
                for stored_as, rows, update in patch.source.spread(self._update(patch), self.shapes):
                    if stored_as == name:
                        total[rows] += update
            merged: Array = total.astype(stored.dtype)
        if not np.isfinite(merged).all():
            raise NonFiniteError(
                f"{name}: the merged weights are too large for {self.weights.info(name).dtype}; try a smaller "
                "--strength, or check the effect of the LoRA on images. Nothing was written"
            )
        return merged

    def _update(self, patch: _Patch) -> Array:
        return patch.factors.delta(patch.source.read(self.weights), self.strength)
