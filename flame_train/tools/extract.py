"""LoRAs of a wanted rank: `extract` of the difference of two checkpoints, layer by layer, `resize` of another LoRA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.nearest import Truncated, Truncation, nearest_to, truncate
from flame_train.disk.preflight import is_same_file, refuse_place
from flame_train.errors import ConfigError, ModelFileError
from flame_train.io.keymap import Shape, Source
from flame_train.io.lora_names import LoraFamily
from flame_train.io.resolve import Resolved
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import Identity, could_be, identify
from flame_train.progress import progress
from flame_train.tools.lora_files import Errors, read_source, resolve_base, same_naming, split_metadata, write_lora
from flame_train.training.session import StopRequest


def resize(source: Path, target: Path, want: Truncation, force: bool = False) -> dict[str, Any]:
    """Writes the LoRA nearest to `source`, module by module; alpha / rank, names and number format stay.

    Modules of no higher rank than wanted stay bit for bit.

    Args:
        want: the rank, or the error that a module may have.

    Returns:
        The report: ranks, the error of all modules together, and the largest of one.

    Raises:
        ConfigError: no module loses anything.
        ModelFileError: the file is no LoRA of a supported family, or of another kind of adapter.
        NonFiniteError: it holds NaN.
        OutputError: `target` exists and `force` is false.
    """
    family, lora = read_source(source, target, force)
    errors = Errors()
    loras: dict[str, dict[str, LoraFactors]] = {}
    ranks: Counter[int] = Counter()
    for component, modules in lora.state.items():
        for module, factors in modules.items():
            if not isinstance(factors, LoraFactors):
                raise ModelFileError(
                    f"{source}: {component} {module} is of kind {factors.kind}, whose rank cannot be cut; "
                    "`flame-train merge --to lora` makes a LoRA of it"
                )
            ranks[factors.rank] += 1
            loras.setdefault(component, {})[module] = errors.add(f"{component} {module}", truncate(factors, want))
    if all(loras[part][name] is factors for part, modules in lora.state.items() for name, factors in modules.items()):
        raise ConfigError(
            f"{source}: nothing can be cut: its highest rank is {max(ranks)}, and each module has as few as that"
        )
    metadata, dropped = split_metadata(lora.metadata)
    tensors = write_lora(target, loras, family, same_naming(lora.dialects), metadata)
    return {
        "source": str(source),
        "target": str(target),
        "tensors": tensors,
        "ranks_before": dict(sorted(ranks.items())),
        **errors.as_dict(),
        "dropped_metadata": list(dropped),
    }


PRECISIONS: Mapping[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def extract(
    base: Path, tuned: Path, target: Path, want: Truncation, precision: str = "bf16", force: bool = False
) -> dict[str, Any]:
    """Writes the LoRA nearest to `tuned` - `base`, in kohya's names. One weight of each file is in memory at a time.

    Layers without a difference are left out. Differences that no LoRA holds, of norms, biases and embeddings, are
    counted.

    Args:
        base, tuned: two models of one family, in any layouts; a single file, or the folder of one component.
        want: the rank, or the error that a layer may have.
        precision: number format of the matrices, "bf16", "fp16" or "fp32".

    Returns:
        The report: modules by component, ranks, the error of all layers together, and the largest of one.

    Raises:
        ModelFileError: the files are not of one supported family, hold NaN, or have no difference.
        NonFiniteError: a matrix is too large for `precision`.
        OutputError: `target` exists and `force` is false.
        Interrupted: a signal came.
    """
    for other in (base, tuned):
        if is_same_file(target, other):
            raise ConfigError(f"{target}: would overwrite {other}; give another name for the result")
    refuse_place(target, ".safetensors", force)
    errors = Errors()
    loras: dict[str, dict[str, LoraFactors]] = {}
    beside = 0
    with StopRequest() as stop, ExitStack() as opened:
        before, after = (opened.enter_context(open_weights(path)) for path in (base, tuned))
        family, old, new = _resolved(base, before, tuned, after)
        modules = {component.name: component.modules for component in family.components}
        shared = list(_shared(family, old, new))
        advance = opened.enter_context(progress("extracting", len(shared)))
        for component, name, pair in shared:
            stop.check("while extracting; nothing was written")
            advance(1)
            difference = _difference(pair, (base, before), (tuned, after), f"{component} {name}")
            if not difference.any():
                continue
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in modules[component] and difference.ndim in (2, 4):
                cut = _rounded(nearest_to(difference, want), PRECISIONS[precision])
                loras.setdefault(component, {})[module] = errors.add(f"{component} {module}", cut)
            else:
                beside += 1
        if not loras:
            raise ModelFileError(f"{tuned}: no layer differs from {base} that a LoRA could hold; nothing was written")
    tensors = write_lora(target, loras, family, "kohya", {})
    return {
        "base": str(base),
        "tuned": str(tuned),
        "target": str(target),
        "modules": {component: len(layers) for component, layers in loras.items()},
        "tensors": tensors,
        **errors.as_dict(),
        "differences_left_out": beside,
    }


def _resolved(base: Path, before: Weights, tuned: Path, after: Weights) -> tuple[LoraFamily, Resolved, Resolved]:
    """Returns the names of both models' weights, and how LoRA files call them."""
    known, other = (identify(weights.shapes, weights.metadata) for weights in (before, after))
    for path, identity in ((base, known), (tuned, other)):
        if identity.kind in ("lora", "adapter"):
            raise ModelFileError(f"{path}: expected a model, but this is: {identity.detail}")
    family = next((f for f in FAMILIES.values() if _is(known, f.name)), None)
    if family is None or not _is(other, family.name):
        raise ModelFileError(f"{tuned}: is {other.detail}, and {base} is {known.detail}: expected two of one family")
    old = resolve_base(base, before.names, known, family.name)
    new = resolve_base(tuned, after.names, other, family.name)
    named: dict[str, Shape] = {}
    for name, source in old.sources.get(family.denoiser, {}).items():  # as a LoRA of rank 1 over every layer
        shape = source.made_shape(before.shapes) or ()
        if name.endswith(".weight") and len(shape) in (2, 4):
            module = f"diffusion_model.{name.removesuffix('.weight')}"
            named |= {f"{module}.lora_A.weight": (1, *shape[1:]), f"{module}.lora_B.weight": (shape[0], 1)}
    return family.lora_names_in(named), old, new


def _is(identity: Identity, family: str) -> bool:
    return identity.family != "unknown" and could_be(identity.family, family)


def _shared(family: LoraFamily, old: Resolved, new: Resolved) -> Iterator[tuple[str, str, tuple[Source, Source]]]:
    """Yields component, native name and both sources of each tensor that both models have, where LoRAs exist."""
    for component in family.components:
        mine, theirs = (resolved.sources.get(component.name, {}) for resolved in (old, new))
        for name in sorted(mine.keys() & theirs.keys()):
            yield component.name, name, (mine[name], theirs[name])


def _difference(
    pair: tuple[Source, Source], one: tuple[Path, Weights], other: tuple[Path, Weights], what: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns what the second model's tensor has more than the first's, in fp64."""
    tensors = []
    for source, (path, weights) in zip(pair, (one, other), strict=True):
        values = source.read(weights).astype(np.float64)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{path}: {what} holds NaN or infinity; get another copy. Nothing was written")
        tensors.append(values)
    before, after = tensors
    if before.shape[:2] != after.shape[:2] or before.size != after.size:
        raise ModelFileError(
            f"{other[0]}: {what} is {after.shape}, and {before.shape} in {one[0]}: another architecture"
        )
    return after.reshape(before.shape) - before


def _rounded(cut: Truncated, dtype: Any) -> Truncated:
    factors = cut.factors
    with np.errstate(over="ignore"):  # told by whoever counts it
        rounded = LoraFactors(factors.down.astype(dtype), factors.up.astype(dtype), factors.alpha)
    return Truncated(rounded, cut.left_out, cut.norm)
