"""`flame-train convert --to comfyui-int8`: a base model in 8 bits, as ComfyUI reads it.

Layers, codes and factors are those with which `model.quantize` stores the same base, so training keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.disk.preflight import is_same_file, refuse_place, size
from flame_train.engine import nn, tensor
from flame_train.engine.dtype import float32
from flame_train.errors import ConfigError, ModelFileError, counted
from flame_train.io.dtypes import DTYPE_OF_TAG, Array, widened
from flame_train.io.keymap import Op
from flame_train.io.packed_formats import DENOISER_PREFIXES, MARK, marked
from flame_train.io.safetensors import TensorInfo, describe, save_stream
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.models.registry import family_of
from flame_train.networks.files.part import Part
from flame_train.progress import progress
from flame_train.tools.lora_files import refuse_lost_packing, size_of, split_metadata
from flame_train.training.session import StopRequest

_PREFIX: Final = "comfyui-"
FORMATS: Final = tuple(f"{_PREFIX}{storage}" for storage in nn.FORMATS if storage.startswith("int8"))
"""What `convert --to` may say of a base."""
_ROUNDED_FROM: Final = frozenset(("F16", "BF16", "F32", "F64"))


@dataclass(frozen=True, slots=True)
class Int8Report:
    """The report of a conversion of a base.

    Attributes:
        size: bytes of the tensors of the source.
        component: the network whose layers are in int8.
        groups: columns that are rotated together, 0 for none -> how many layers.
        left: how many linear layers of the network stay as they are.
        dropped_metadata: keys too long to keep.
    """

    source: Path
    target: Path
    to: str
    size: int
    component: str
    groups: dict[int, int]
    left: int
    dropped_metadata: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return asdict(self) | {"source": str(self.source), "target": str(self.target)}


def convert_base(source: Path, target: Path, to: str, force: bool = False) -> Int8Report:
    """Writes the base `source` with its denoiser's layers in int8, and all else as it is. Returns the report.

    Raises:
        ConfigError: both are one file.
        ModelFileError: no base, one in another layout than ComfyUI's, or whose layers to round are packed already or
            hold NaN.
        OutputError: the target cannot be written, or exists without `force`.
        Interrupted: a signal came.
    """
    if is_same_file(target, source):
        raise ConfigError(f"{target}: source and target are the same file; give another name for the target")
    refuse_place(target, ".safetensors", force)
    family, storage = family_of(source), nn.Storage(to.removeprefix(_PREFIX))
    part = family.files.parts(source, [family.denoiser])[family.denoiser]
    with StopRequest() as stop, open_weights(source, as_stored=True) as weights:
        layers, stored = _layers(part, storage), lru_cache(1)(partial(_stored, weights, storage))
        infos: list[TensorInfo] = []
        made: dict[str, Callable[[], Array]] = {}
        for name in weights.names:
            info = weights.info(name)
            if info.dtype not in (_ROUNDED_FROM if name in layers else DTYPE_OF_TAG):
                raise _packed(source, name, info.dtype)
            if name not in layers:
                infos.append(info)
                continue
            (rows, columns), layer = info.shape, name.removesuffix(".weight")
            mark = np.frombuffer(marked(storage.group_of(columns)), np.uint8)
            infos += [TensorInfo(name, "I8", info.shape, rows * columns), describe(layer + MARK, mark)]
            infos.append(TensorInfo(f"{name}_scale", "F32", (rows, 1), 4 * rows))
            made[layer + MARK] = partial(np.asarray, mark)
            made[name], made[f"{name}_scale"] = partial(_codes, stored, name), partial(_factors, stored, name, source)
        metadata, dropped = split_metadata(weights.metadata)
        refuse_lost_packing(source, dropped)
        metadata.pop("modelspec.hash_sha256", None)  # no longer true
        with progress(f"writing {target.name}", len(infos)) as advance:

            def read(name: str) -> Array:
                stop.check("while converting; nothing was written")
                advance(1)
                return made[name]() if name in made else weights.read(name)

            save_stream(target, infos, read, metadata, {name: f"{name}_scale" for name in layers})
        groups = Counter(storage.group_of(weights.info(name).shape[1]) for name in layers)
        before = sum(weights.info(name).nbytes for name in weights.names)
    linear = sum(isinstance(module, nn.Linear) for _, module in part.network.named_modules())
    return Int8Report(source, target, to, before, family.denoiser, dict(groups), linear - len(layers), dropped)


def describe_base(report: Mapping[str, Any], readers: list[str]) -> str:
    """Describes a base that `convert_base` wrote, and which programs take it."""
    groups = (
        f"{counted(count, 'layer')} {f'rotated by {size} columns' if size else 'not rotated'}"
        for size, count in sorted(report["groups"].items(), reverse=True)
    )
    lines = [
        f"{report['target']}: {size_of(report['target'])}, the {report['component']} in int8: {', '.join(groups)}",
        f"before: {report['source']}: {size(report['size'])}",
        f"  as they were: {counted(report['left'], 'linear layer')} of the {report['component']}, and all else",
        *readers,
    ]
    dropped = ", ".join(report["dropped_metadata"])
    return "\n".join([*lines, *([f"left out of the metadata, which would be too long: {dropped}"] if dropped else [])])


def _layers(part: Part, storage: nn.Storage) -> frozenset[str]:
    """Returns the stored names of the weights to round."""
    chosen = part.network.quantizable(storage.rotated)
    found, prefixes = set(), set()
    for name in (f"{name}.weight" for name, module in part.network.named_modules() if module in chosen):
        source = part.sources[name]
        if source.op is Op.SCALE:
            raise _packed(part.path, source.names[0], "scaled fp8")
        if source.op is not Op.COPY or not source.names[0].endswith(name):
            raise ModelFileError(
                f"{part.path}: expected the names of ComfyUI's own files, such as {name}, got {source.names[0]}; "
                "name the single file of the model instead"
            )
        prefixes.add(source.names[0].removesuffix(name))
        if source.shape is None:  # else it is a convolution there, and ComfyUI has those in 16 bits alone
            found.add(source.names[0])
    if foreign := prefixes.difference(DENOISER_PREFIXES):
        prefix = min(foreign)
        other = part.path / prefix if prefix.endswith("/") else "the single file of the model"
        raise ModelFileError(
            f"{part.path}: expected names as ComfyUI reads them, plain or below model.diffusion_model., got them below "
            f"{prefix}; name {other} instead"
        )
    return frozenset(found)


def _packed(path: Path, name: str, how: str) -> ModelFileError:
    return ModelFileError(f"{path}: {name} is packed as {how} already; name the model's file in 16 bits instead")


def _stored(weights: Weights, storage: nn.Storage, name: str) -> nn.ScaledWeight:
    wide = tensor(np.ascontiguousarray(widened(weights.read(name), float32)))
    stored = nn.QuantizedWeight.of(wide, storage)
    assert isinstance(stored, nn.ScaledWeight)
    return stored


def _codes(stored: Callable[[str], nn.ScaledWeight], name: str) -> Array:
    codes: Array = stored(name).data.numpy()
    return codes


def _factors(stored: Callable[[str], nn.ScaledWeight], name: str, source: Path) -> Array:
    factors: Array = stored(name).magnitudes.reshape(-1, 1)
    if not np.isfinite(factors).all():
        raise ModelFileError(
            f"{source}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run: get another "
            "copy. Nothing was written"
        )
    return factors
