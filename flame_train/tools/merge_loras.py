"""`flame-train merge --to lora`: several adapters of any kind, each with a strength, as one plain LoRA."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.factors import Array, LoraFactors
from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import Factors
from flame_train.adapters.metadata import MERGED_KEY
from flame_train.adapters.nearest import Truncated, Truncation, nearest_to, truncate
from flame_train.adapters.together import summed
from flame_train.disk.preflight import is_same_file, refuse_place
from flame_train.errors import ConfigError, ModelFileError
from flame_train.io.dtypes import widened
from flame_train.io.hub import fetch_path
from flame_train.io.lora_names import LoraFamily
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.identify import could_be, identify
from flame_train.progress import progress
from flame_train.tools.lora_files import (
    Errors,
    file_and_strength,
    lora_family,
    refuse_non_finite,
    require_lora,
    resolve_base,
    write_lora,
)
from flame_train.training.session import StopRequest


@dataclass(frozen=True, slots=True)
class WeightedLora:
    """A LoRA's file and its strength."""

    path: Path
    strength: float

    @classmethod
    def parse(cls, text: str) -> WeightedLora:
        """Reads `FILE` or `FILE:STRENGTH`. Raises ConfigError for a strength that adds nothing or is not finite."""
        path, strength = file_and_strength(text)
        if not np.isfinite(strength) or strength == 0.0:
            raise ConfigError(f"--lora {text}: expected a finite strength other than 0, got {strength}")
        return cls(fetch_path(path), strength)


def merge_loras(
    loras: Sequence[WeightedLora],
    target: Path,
    want: Truncation | None,
    base: Path | None = None,
    force: bool = False,
    skip_unknown: bool = False,
) -> dict[str, Any]:
    """Writes one LoRA, in kohya's names, whose update is the sum of all, each times its strength.

    Without `want` the matrices are put side by side: exact but for rounding strengths, and the ranks add up. With it,
    each module gets the nearest LoRA of that rank or error. LoHa, LoKr and DoRA always need `want` and `base`. A DoRA's
    update depends on the base's weights, and files of LoHa and LoKr do not tell a convolution's kernel.

    Args:
        loras: the files with their strengths.
        want: the rank, or the error that a module may have; None: all of it.
        base: the model that the adapters are for.
        skip_unknown: whether parts of the LoRAs of no module are left out.

    Returns:
        The report: modules by component, ranks, the error of all modules together, and the largest of one.

    Raises:
        ConfigError: `want` or `base` is missing.
        ModelFileError: the files are not of one family, or do not fit each other or the base.
        NonFiniteError: one holds NaN, or a value becomes too large.
        OutputError: `target` exists and `force` is false.
        Interrupted: a signal came.
    """
    if not loras:
        raise ConfigError("--to lora: name at least one file with --lora FILE or --lora FILE:STRENGTH")
    for path in [lora.path for lora in loras] + ([base] if base else []):
        if is_same_file(target, path):
            raise ConfigError(f"{target}: would overwrite {path}; give another name for the result")
    refuse_place(target, ".safetensors", force)
    family, by_module = _read(loras, skip_unknown)
    _check_kinds(by_module, want, base)
    errors = Errors()
    loras_made: dict[str, dict[str, LoraFactors]] = {}
    with StopRequest() as stop, ExitStack() as opened:
        weights = _Base(base, family, opened) if base else None
        advance = opened.enter_context(progress("merging", len(by_module)))
        for (component, module), parts in by_module.items():
            stop.check("while merging; nothing was written")
            advance(1)
            what = f"{component} {module}"
            try:
                # what is too large for the file is reported as it is written, with the tensor's name
                with np.errstate(over="ignore", invalid="ignore"):
                    total = _sum(parts, want, weights, component, module)
                loras_made.setdefault(component, {})[module] = errors.add(what, total)
            except ValueError as fault:
                raise ModelFileError(f"{what} {fault}; nothing was written") from None
    history = json.dumps([{"lora": lora.path.name, "strength": lora.strength} for lora in loras])
    tensors = write_lora(target, loras_made, family, "kohya", {MERGED_KEY: history})
    return {
        "loras": [{"lora": str(lora.path), "strength": lora.strength} for lora in loras],
        "target": str(target),
        "modules": {component: len(modules) for component, modules in loras_made.items()},
        "tensors": tensors,
        **errors.as_dict(),
    }


_Parts = list[tuple[Factors, float]]


def _read(loras: Sequence[WeightedLora], skip_unknown: bool) -> tuple[LoraFamily, dict[tuple[str, str], _Parts]]:
    """Returns the family, and every module's factors with their strengths. Raises ModelFileError for two families."""
    families: list[LoraFamily] = []
    parts: dict[tuple[str, str], _Parts] = {}
    for lora in loras:
        families.append(lora_family(lora.path, require_lora(lora.path)))
        if families[-1].name != families[0].name:
            raise ModelFileError(
                f"{lora.path}: is a LoRA for {families[-1].name}, and {loras[0].path} for {families[0].name}"
            )
        state = from_file(lora.path, families[-1], skip_unknown).state
        refuse_non_finite(lora.path, state)
        for component, modules in state.items():
            for module, factors in modules.items():
                parts.setdefault((component, module), []).append((factors, lora.strength))
    return max(families, key=lambda family: len(family.components[0].modules)), parts


def _check_kinds(by_module: Mapping[tuple[str, str], _Parts], want: Truncation | None, base: Path | None) -> None:
    """Raises ConfigError where what is not a plain LoRA lacks what its nearest LoRA needs."""
    others = {
        factors.kind for parts in by_module.values() for factors, _ in parts if not isinstance(factors, LoraFactors)
    }
    if not others:
        return
    kinds = ", ".join(sorted(others))
    if want is None:
        raise ConfigError(f"{kinds}: no LoRA is exactly that; say how near it shall be with --rank N or --error E")
    if base is None:
        raise ConfigError(f"{kinds}: its update is known with the base model only; name it first: merge BASE --to lora")


def _sum(parts: _Parts, want: Truncation | None, base: _Base | None, component: str, module: str) -> Truncated:
    plain = [(factors, strength) for factors, strength in parts if isinstance(factors, LoraFactors)]
    if len(plain) == len(parts):
        whole = summed(plain)
        if want is not None:
            return truncate(whole, want)
        norm = float(np.linalg.norm(whole.delta()))
        return Truncated(whole, 0.0, norm)
    assert want is not None
    assert base is not None
    weight = base.weight(component, module)
    update = np.zeros(weight.shape)
    for factors, strength in parts:
        if not factors.fits(weight.shape):
            raise ValueError(f"is {factors.weight_shape} in a file, and {weight.shape} in the base")
        update += factors.delta(weight, strength).reshape(weight.shape)
    return nearest_to(update, want)


class _Base:
    """The base model's weights by component and module."""

    def __init__(self, path: Path, family: LoraFamily, opened: ExitStack) -> None:
        self._path = path
        self._weights: Weights = opened.enter_context(open_weights(path))
        identity = identify(self._weights.shapes, self._weights.metadata)
        if identity.kind in ("lora", "adapter") or not could_be(identity.family, family.name):
            raise ModelFileError(f"{path}: expected a base model for {family.name}, but this is: {identity.detail}")
        self._sources = resolve_base(path, self._weights.names, identity, family.name).sources

    def weight(self, component: str, module: str) -> Array:
        """Returns the weight in fp32. ValueError where the base has none."""
        source = self._sources.get(component, {}).get(f"{module}.weight")
        if source is None:
            raise ValueError(f"is not in {self._path}")
        return widened(source.read(self._weights), np.float32)
