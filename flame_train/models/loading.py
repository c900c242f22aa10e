"""SDXL's networks from a file: a single-file checkpoint, a diffusers folder, or a component alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
from .keys import sdxl
from .parts import Native, digest, parts
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
        found = _parts(weights, shapes, resolved, components)
        for name, (module, source) in found.items():
            target = vae_dtype if name == "vae" else dtype
            nn.load(module, source, dtype=target, device=device, what=f"{path}: {name}", check_finite=check_finite)
    models: dict[str, Any] = {name: found[name][0] if name in found else None for name in COMPONENTS}
    return Sdxl(**models, ignored=_ignored(resolved, components))


def load_vae(path: str | Path, *, device: str, dtype: DType | str = "float32", scaling_factor: float = 0.13025) -> Vae:
    """A 4-channel autoencoder from a file or folder of its own, in either layout; see `load_sdxl`."""
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        found = _parts(weights, shapes, _lone_vae(weights, shapes), ["vae"])
        arch = VaeArch.from_shapes(found["vae"][1].shapes, scaling_factor)
        vae = Vae(arch)
        nn.load(vae, found["vae"][1], dtype=dtype, device=device, what=f"{path}: vae")
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
            found = _parts(weights, shapes, resolved, COMPONENTS)
        else:
            found = _parts(weights, shapes, _lone_vae(weights, shapes), [only])
    return {name: dict(module.shapes()) for name, (module, _) in found.items()}


def tensor_digest(path: str | Path, components: Collection[str], alone: bool = False) -> str:
    """SHA-256, in hex, over names and values of the components' tensors: what a cache of their outputs depends on.

    `alone` says that the file holds nothing but a VAE.
    """
    with open_weights(path) as weights:
        shapes = shapes_of(weights)
        resolved = _lone_vae(weights, shapes) if alone else _resolved(weights, shapes, components)
        return digest(weights, [resolved.sources[name] for name in components])


def _lone_vae(weights: Weights, shapes: Mapping[str, Shape]) -> Resolved:
    """The tensors of a file that holds an SDXL autoencoder and nothing else."""
    found = identify(shapes, weights.metadata)
    if found.kind != "vae" or not could_be(found.family, "sdxl"):
        raise ModelFileError(f"{weights.path}: expected an SDXL VAE alone, found {found.detail}; name another file")
    return sdxl.resolve(shapes, only="vae")


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
) -> dict[str, tuple[nn.Module, Native]]:
    wanted = [next(c for c in sdxl.COMPONENTS if c.name == name) for name in components]
    return parts(weights, shapes, resolved, wanted, _build)


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
