"""SD3's and SD3.5's networks from a file: a single-file checkpoint, a diffusers folder, or a text encoder alone.

T5 has a loader of its own (`loading_t5`), for it is often kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.engine import nn
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape
from flame_train.io.resolve import Resolved
from flame_train.io.weights import Weights, open_weights, shapes_of

from .clip import ClipArch, ClipTextEncoder
from .identify import could_be, identify
from .keys import sd3
from .mmdit_sd3 import Mmdit, MmditArch
from .parts import digest, parts
from .vae import Vae, VaeArch

COMPONENTS: Final = ("transformer", "vae", "text_encoder", "text_encoder_2")
_KNOWN_AS: Final = {"text_encoder": "clip-l", "text_encoder_2": "clip-bigg"}


def load_sd3(path: str | Path, component: str, *, device: str, dtype: DType | str, check_finite: bool = True) -> Any:
    """One network (`Mmdit`, `Vae` or `ClipTextEncoder`) on `device` in `dtype`, streamed tensor by tensor.

    Raises ModelFileError for a file of another family, naming it; for one that lacks the component; and for every
    missing, unexpected or mis-shaped tensor, all in one message, before anything is read.
    """
    with open_weights(path) as weights:
        module, source = _parts(weights, _resolved(weights, [component]), [component])[component]
        nn.load(module, source, dtype=dtype, device=device, what=f"{path}: {component}", check_finite=check_finite)
    return module


def inspect_sd3(path: str | Path, components: Collection[str]) -> dict[str, dict[str, Shape]]:
    """Native names and shapes of each component, from headers alone. Raises ModelFileError as `load_sd3` does."""
    with open_weights(path) as weights:
        found = _parts(weights, _resolved(weights, components), components)
    return {name: dict(module.shapes()) for name, (module, _) in found.items()}


def holds(path: str | Path) -> frozenset[str]:
    """Which components a file or folder holds, T5 ("text_encoder_3") among them."""
    with open_weights(path) as weights:
        return frozenset(name for name, sources in _resolved(weights, ()).sources.items() if sources)


def sd3_digest(path: str | Path, components: Collection[str]) -> str:
    """SHA-256, in hex, over names and values of the components' tensors: what a cache of their outputs depends on."""
    with open_weights(path) as weights:
        resolved = _resolved(weights, components)
        return digest(weights, [resolved.sources[name] for name in components])


def _resolved(weights: Weights, components: Collection[str]) -> Resolved:
    """The file's tensors sorted into components, once it is known to be SD3 and to hold what is wanted."""
    found = identify(shapes_of(weights), weights.metadata)
    alone = None
    if found.kind == "text_encoder" and len(components) == 1:
        (wanted,) = components
        alone = wanted if found.family in (_KNOWN_AS.get(wanted), "unknown") else None
    if alone is None and (found.kind not in ("checkpoint", "transformer") or not could_be(found.family, "sd3")):
        raise ModelFileError(f"{weights.path}: expected an SD3 model, found {found.detail}; name another file")
    resolved = sd3.resolve(weights.names, only=alone or (None if found.kind == "checkpoint" else found.kind))
    lacking = [name for name in components if not resolved.sources.get(name)]
    if lacking:
        raise ModelFileError(
            f"{weights.path}: expected {', '.join(components)}, but it holds no {', no '.join(lacking)}; "
            "use a full checkpoint or a diffusers folder, or name the text encoders' own files"
        )
    return resolved


def _parts(weights: Weights, resolved: Resolved, components: Collection[str]) -> Mapping[str, Any]:
    wanted = [next(c for c in sd3.COMPONENTS if c.name == name) for name in components]
    return parts(weights, shapes_of(weights), resolved, wanted, _build)


def _build(component: str, native: Mapping[str, Shape]) -> nn.Module:
    if component == "transformer":
        return Mmdit(MmditArch.from_shapes(native))
    if component == "vae":
        published = VaeArch.sd3()
        return Vae(VaeArch.from_shapes(native, published.scaling_factor, published.shift_factor))
    return ClipTextEncoder(ClipArch.from_shapes(native, "quick_gelu" if component == "text_encoder" else "gelu"))
