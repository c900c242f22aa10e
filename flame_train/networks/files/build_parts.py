"""A model's networks from an open file: each component's empty network, and where each of its weights is read.

Names and shapes of all components are checked first. Then each tensor goes from the file to the device by itself, so
the host never holds a whole network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Op, Shape, Source
from flame_train.io.resolve import Component, Resolved, fit, native_shapes
from flame_train.io.weight_files import Kept, Weights
from flame_train.networks.files.stated import Stated
from flame_train.progress import progress

_FACTORS: Final = (".scale_weight", ".weight_scale", ".weight_scale_inv")
Build = Callable[[str, Mapping[str, Shape], Stated], nn.Module]
"""A component's empty network, from its name, its native names and shapes, and what its folder states."""


def built_by(**networks: tuple[Callable[[Any], nn.Module], Callable[..., Any]]) -> Build:
    """The `Build` of a table: component -> its network's class, and what reads the architecture that the class takes.

    The latter is called as `from_shapes(native, stated=stated)`.
    """

    def build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        network, from_shapes = networks[component]
        return network(from_shapes(native, stated=stated))

    return build


class Native:
    """One component's tensors by native name: a `WeightSource` over the open file."""

    def __init__(self, weights: Weights, sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> None:
        self.shapes, self.sources = shapes, sources
        self._weights = weights

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self.sources[name].read(self._weights)

    def close(self) -> None:
        """Ends what reads ahead."""

    def as_kept(self, name: str) -> Kept | None:
        """Returns the tensor in fewer bits, where the file holds it, and it alone, so."""
        source = self.sources[name]
        alone = source.op is Op.COPY and (source.parts, source.shape) == (1, None)
        return self._weights.as_kept(source.names[0]) if alone else None


def parts(
    weights: Weights, shapes: Mapping[str, Shape], resolved: Resolved, components: Sequence[Component], build: Build
) -> dict[str, tuple[nn.Module, Native]]:
    """Returns each component's empty network and the sources of its weights, every name and shape checked.

    Args:
        weights: the file with the tensors.
        shapes: the shapes of its tensors, by stored name.
        resolved: the components' names of its tensors.
        components: the components that are wanted.
        build: makes the network of a component from its shapes.

    Raises:
        ModelFileError: all missing, unexpected and mis-shaped tensors of all components. A tensor is unexpected if its
            name has a component's prefix and no place in that component.
    """
    networks: dict[str, tuple[nn.Module, Native]] = {}
    faults = []
    for component in components:
        sources = resolved.sources[component.name]
        native = native_shapes(sources, shapes)
        try:
            unknown = (name for name in resolved.unknown if name.startswith(component.prefixes))
            _refuse_scaled(weights, component, (*sources, *unknown))
            module = _built(weights, component, native, build)
            fitted = fit(sources, shapes, module.shapes())
            stray = {name: shapes[name] for name in resolved.unknown if name.startswith(component.prefixes)}
            shapes_read = {name: source.shape for name, source in fitted.sources.items() if source.shape is not None}
            nn.check_shapes(module.shapes(), native | shapes_read | stray, f"{weights.path}: {component.name}")
        except ModelFileError as fault:
            faults.append(str(fault))
        else:
            networks[component.name] = module, Native(weights, fitted.sources, native | shapes_read)
    if faults:
        raise ModelFileError("\n".join(faults))
    return networks


def _refuse_scaled(weights: Weights, component: Component, names: Iterable[str]) -> None:
    """Raises ModelFileError for factors of weights in 8 bits that no table of the component has read."""
    left = next((name for name in names if name.endswith(_FACTORS)), None)
    if left is not None:
        raise ModelFileError(
            f"{weights.path}: {component.name} has weights in 8 bits of a form that is not read here ({left}); name a "
            "file in fp16, bf16 or plain fp8"
        )


def _built(weights: Weights, component: Component, native: Mapping[str, Shape], build: Build) -> nn.Module:
    """Returns the network that `build` makes from the shapes; errors begin with the file's name."""
    try:
        return build(component.name, native, Stated.beside(weights.path, component.prefixes))
    except ModelFileError as fault:
        raise ModelFileError(f"{weights.path}: {fault}") from None


def digest(weights: Weights, sources: Iterable[Mapping[str, Source]]) -> str:
    """Returns SHA-256, in hex, over names and values of the file's tensors that the components' sources read."""
    summed = hashlib.sha256()
    used = {name for component in sources for source in component.values() for name in source.names}
    size = sum(weights.info(name).nbytes for name in used)
    with progress(f"hashing {weights.path.name}", size, in_bytes=True) as advance:
        for name in sorted(used):
            info = weights.info(name)
            summed.update(f"{name} {info.dtype} {info.shape}".encode())
            for array in weights.stored(name):
                summed.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
                advance(array.nbytes)
    return summed.hexdigest()
