"""SDXL's networks from a file: a single-file checkpoint, a diffusers folder, or a component alone.

Everything is checked against names and shapes first, for all components together; then each tensor goes from the
file to the device on its own, so the host never holds a whole network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.engine import nn
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape, Source
from flame_train.io.resolve import Resolved, fit, native_shapes
from flame_train.io.weights import Weights, open_weights, shapes_of

from .clip import ClipArch, ClipTextEncoder
from .identify import could_be, identify
from .keys import sdxl
from .unet_sdxl import UNet, UNetArch
from .vae import Vae, VaeArch

COMPONENTS: Final = ("unet", "vae", "text_encoder", "text_encoder_2")


@dataclass(frozen=True, slots=True)
class Sdxl:
    """SDXL's networks; None for those not asked for. `ignored` are the file's tensors that none of them uses."""

    unet: UNet | None
    vae: Vae | None
    text_encoder: ClipTextEncoder | None
    text_encoder_2: ClipTextEncoder | None
    ignored: tuple[str, ...]


def load_sdxl(
    path: str | Path,
    *,
    device: str,
    dtype: DType | str,
    components: Collection[str] = COMPONENTS,
    vae_dtype: DType | str = "float32",
    check_finite: bool = True,
) -> Sdxl:
    """SDXL from a single file or a diffusers folder, its components on `device` in `dtype`.

    The autoencoder has a dtype of its own: the published one overflows in fp16. Raises ModelFileError for a file
    of another family, naming it; for one that lacks a component; and for every missing, unexpected or mis-shaped
    tensor of the components asked for, all in one message, before anything is read.
    """
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        resolved = _resolved(weights, shapes, components)
        parts = _parts(weights, shapes, resolved, components)
        for name, (module, source) in parts.items():
            target = vae_dtype if name == "vae" else dtype
            nn.load(module, source, dtype=target, device=device, what=f"{path}: {name}", check_finite=check_finite)
    models: dict[str, Any] = {name: parts[name][0] if name in parts else None for name in COMPONENTS}
    return Sdxl(**models, ignored=_ignored(resolved, components))


def load_vae(path: str | Path, *, device: str, dtype: DType | str = "float32", scaling_factor: float = 0.13025) -> Vae:
    """A 4-channel autoencoder from a file or folder of its own, in either layout; see `load_sdxl`."""
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        parts = _parts(weights, shapes, _lone_vae(weights, shapes), ["vae"])
        arch = VaeArch.from_shapes(parts["vae"][1].shapes, scaling_factor)
        vae = Vae(arch)
        nn.load(vae, parts["vae"][1], dtype=dtype, device=device, what=f"{path}: vae")
    return vae


def inspect_sdxl(path: str | Path, only: str | None = None) -> dict[str, dict[str, Shape]]:
    """Native names and shapes of each component in a file or folder, from headers alone.

    `only` ("vae") expects a file of that component by itself. Raises ModelFileError as `load_sdxl` does, for
    missing, unexpected and mis-shaped tensors of all components together.
    """
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        if only is None:
            resolved = _resolved(weights, shapes, COMPONENTS)
            parts = _parts(weights, shapes, resolved, COMPONENTS)
        else:
            parts = _parts(weights, shapes, _lone_vae(weights, shapes), [only])
    return {name: dict(module.shapes()) for name, (module, _) in parts.items()}


def tensor_digest(path: str | Path, components: Collection[str], alone: bool = False) -> str:
    """SHA-256, in hex, over names and values of the components' tensors: what a cache of their outputs depends on.

    `alone` says that the file holds nothing but a VAE.
    """
    digest = hashlib.sha256()
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        resolved = _lone_vae(weights, shapes) if alone else _resolved(weights, shapes, components)
        used = {n for c in components for source in resolved.sources[c].values() for n in source.names}
        for name in sorted(used):
            array = weights.read(name)
            digest.update(f"{name} {weights.info(name).dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def _lone_vae(weights: Weights, shapes: Mapping[str, Shape]) -> Resolved:
    """The tensors of a file that holds an SDXL autoencoder and nothing else."""
    found = identify(shapes, weights.metadata)
    if found.kind != "vae" or not could_be(found.family, "sdxl"):
        raise ModelFileError(f"{weights.path}: expected an SDXL VAE alone, found {found.detail}; name another file")
    return sdxl.resolve(shapes, only="vae")


class _Native:
    """One component's tensors by native name: a `WeightSource` over the open file."""

    def __init__(self, weights: Weights, sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self._weights, self._sources = weights, sources

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self._sources[name].read(self._weights)


def _resolved(weights: Weights, shapes: Mapping[str, Shape], components: Collection[str]) -> Resolved:
    """The file's tensors sorted into components, once it is known to be SDXL and to hold what is wanted."""
    found = identify(shapes, weights.metadata)
    if found.kind not in ("checkpoint", "unet") or found.family != "sdxl":
        raise ModelFileError(f"{weights.path}: expected an SDXL model, found {found.detail}; name another file")
    resolved = sdxl.resolve(shapes, only="unet" if found.kind == "unet" else None)
    lacking = [name for name in components if not resolved.sources.get(name)]
    if lacking:
        raise ModelFileError(
            f"{weights.path}: expected {', '.join(components)}, but it holds no {', no '.join(lacking)}; "
            "use a full checkpoint or a diffusers folder"
        )
    return resolved


def _parts(
    weights: Weights, shapes: Mapping[str, Shape], resolved: Resolved, components: Collection[str]
) -> dict[str, tuple[nn.Module, _Native]]:
    """Each component's empty network and where its weights come from, every name and shape checked."""
    parts: dict[str, tuple[nn.Module, _Native]] = {}
    faults = []
    for name in components:
        native = native_shapes(resolved.sources[name], shapes)
        try:
            module = _build(name, native)
            fitted = fit(resolved.sources[name], shapes, module.shapes())
            stray = {n: shapes[n] for n in resolved.unknown if _belongs(n, name)}
            made = {n: source.shape for n, source in fitted.sources.items() if source.shape is not None}
            nn.check_shapes(module.shapes(), native | made | stray, f"{weights.path}: {name}")
        except ModelFileError as fault:
            faults.append(str(fault))
        else:
            parts[name] = module, _Native(weights, fitted.sources, native | made)
    if faults:
        raise ModelFileError("\n".join(faults))
    return parts


def _build(component: str, native: Mapping[str, Shape]) -> nn.Module:
    if component == "unet":
        return UNet(UNetArch.from_shapes(native))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native))
    return ClipTextEncoder(ClipArch.from_shapes(native, "quick_gelu" if component == "text_encoder" else "gelu"))


def _belongs(name: str, component: str) -> bool:
    prefixes = next(c.prefixes for c in sdxl.COMPONENTS if c.name == component)
    return name.startswith(prefixes)


def _ignored(resolved: Resolved, components: Collection[str]) -> tuple[str, ...]:
    left = [n for n in resolved.unknown if not any(_belongs(n, component) for component in components)]
    return tuple(sorted([*resolved.ignored, *left]))
