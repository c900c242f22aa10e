"""One network of an opened base model: its name, and the source of each of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError
from flame_train.io.digests import Digests
from flame_train.io.keymap import Shape, Source
from flame_train.io.weight_files import Kept, Weights
from flame_train.io.weights import open_weights
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.block_offload import StreamedWeights
from flame_train.networks.block_reading import WeightsInFile, resident_parts
from flame_train.networks.files.build_parts import Native, digest
from flame_train.progress import progress


@dataclass(frozen=True, slots=True)
class Target:
    """Where a network's weights go, as `Part.load` has it; `mover` takes those of blocks that wait in host memory."""

    device: str
    dtype: DType | str
    storage: nn.Storage | None
    check_finite: bool
    mover: StreamedWeights | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Part:
    """A network with its weights declared and none loaded.

    Attributes:
        component: its name in the model, such as "unet" or "text_encoder_2".
        path: the file or folder that holds it.
        network: the network, of which only names and shapes are known.
        build: makes another such network.
        sources: native name -> where in the file the tensor is read.
        shapes: native name -> shape.
    """

    component: str
    path: Path
    network: nn.Module
    build: Callable[[], nn.Module]
    sources: Mapping[str, Source]
    shapes: Mapping[str, Shape]

    def __repr__(self) -> str:
        return f"Part({self.component!r}, {str(self.path)!r})"

    def load(
        self,
        *,
        device: str,
        dtype: DType | str,
        storage: nn.Storage | None = None,
        check_finite: bool = True,
        streamed: Collection[str] = (),
    ) -> Any:
        """Returns a network with its weights, of the class that `build` makes. Tensors go to the device one by one.

        On a described GPU it reads no file.

        Args:
            storage: how quantizable layers are stored; None: as all else.
            check_finite: whether NaN and infinity are refused.
            streamed: the names of blocks that wait in host memory, from which each goes as soon as it is loaded.

        Raises:
            ModelFileError: a tensor holds NaN or infinity, or the file was changed since it was opened.
            DeviceFault: the host has no memory for the blocks.
            OtherRankFailed: another process that keeps blocks for this one did.
        """
        network = self.build()
        blocks = StreamedWeights(network, streamed, get_backend(device)) if streamed else None
        self._fill(network, Target(device, dtype, storage, check_finite, blocks))
        if blocks is not None:
            blocks.begin()
        return network

    def load_in_turn(self, *, device: str, dtype: DType | str) -> Any:
        """Returns the network with the weights of no block: each is read from the file whenever it is to run.

        Raises:
            ModelFileError: a tensor holds NaN or infinity, or the file was changed since it was opened. The network
                raises the same when it runs.
        """
        network = self.build()
        assert isinstance(network, BlockNetwork)
        target = Target(device, dtype, None, True, None)
        for name, part in resident_parts(network).items():
            self._fill_part(name, part, target)
        WeightsInFile(network, partial(self._fill_part, target=target))
        return network

    def _fill_part(self, name: str, part: nn.Module, target: Target) -> None:
        """Loads what of the network lies below a name."""
        if get_backend(target.device).described:
            nn.allocate(part, dtype=target.dtype, device=target.device)
            return
        with open_weights(self.path) as weights, closing(self.source(weights, lambda _: None)) as source:
            below, what = Below(f"{name}.", source), f"{self.path}: {name}"
            nn.load(part, below, dtype=target.dtype, device=target.device, what=what)

    def _fill(self, network: nn.Module, target: Target) -> None:
        if get_backend(target.device).described:
            dtype, device, storage = target.dtype, target.device, target.storage
            nn.allocate(network, dtype=dtype, device=device, storage=storage, mover=target.mover)
            return
        with open_weights(self.path) as weights:
            name = self.component.replace("_", " ")
            what, tensors = f"{self.path}: {name}", len(list(network.named_specs()))
            with (
                progress(f"loading {name}", tensors) as advance,
                closing(self.source(weights, advance)) as source,
            ):
                nn.load(
                    network,
                    source,
                    dtype=target.dtype,
                    device=target.device,
                    what=what,
                    check_finite=target.check_finite,
                    storage=target.storage,
                    mover=target.mover,
                )

    def source(self, weights: Weights, advance: Callable[[float], None]) -> Native:
        """Returns what the weights are read from, of its opened file; `advance` hears of each tensor."""
        return Unchanged(weights, self.sources, self.shapes, advance)

    def digest(self, digests: Digests | None = None) -> str:
        """Returns SHA-256, in hex, over names and values of all its tensors: a cache of its outputs depends on it.

        Files whose digest `digests` knows are not read.
        """
        with open_weights(self.path) as weights:
            names = sorted({name for source in self.sources.values() for name in source.names})
            what = f"tensors {hashlib.sha256(json.dumps(names).encode()).hexdigest()}"
            return (digests or Digests(None)).of(weights.files, what, lambda: digest(weights, [self.sources]))


class Unchanged(Native):
    """Reads from a file that was opened again, and refuses it where it holds other shapes than it did."""

    def __init__(
        self,
        weights: Weights,
        sources: Mapping[str, Source],
        shapes: Mapping[str, Shape],
        advance: Callable[[float], None],
    ) -> None:
        super().__init__(weights, sources, shapes)
        self._advance, self._counted = advance, set[str]()

    def _count(self, name: str) -> None:
        """Advances by a tensor that is read, once where it is asked for as it is kept first."""
        if name not in self._counted:
            self._counted.add(name)
            self._advance(1)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        array = super().read(name)
        self._count(name)
        self._refuse_changed(name, array.shape)
        return array

    def as_kept(self, name: str) -> Kept | None:
        packed = super().as_kept(name)
        if packed is not None:
            self._count(name)
            self._refuse_changed(name, self._weights.info(self.sources[name].names[0]).shape)
        return packed

    def _refuse_changed(self, name: str, shape: Sequence[int]) -> None:
        if tuple(shape) != self.shapes[name]:
            raise ModelFileError(
                f"{self._weights.path}: {name} had the shape {self.shapes[name]} when the file was checked, and has "
                f"{tuple(shape)} now; it was replaced meanwhile: start again"
            )


class Below:
    """The tensors of a source whose names begin with a prefix, without it."""

    def __init__(self, prefix: str, source: Native) -> None:
        self._prefix, self._source = prefix, source
        names = ((name, name.removeprefix(prefix)) for name in source.shapes if name.startswith(prefix))
        self.shapes = {short: source.shapes[name] for name, short in names}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self._source.read(self._prefix + name)


def part_of(weights: Weights, component: str, built: tuple[nn.Module, Native], build: Callable[[], nn.Module]) -> Part:
    """Returns the `Part` that an open file holds, of its network and its sources as `parts.parts` gives them."""
    network, native = built
    return Part(component, weights.path, network, build, native.sources, native.shapes)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JoinedPart(Part):
    """A network made of others. It has no tensors of its own: `sources` and `shapes` are empty.

    Attributes:
        parts: those others, by the attributes that they are.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)

    @classmethod
    def of(cls, first: str, parts: Mapping[str, Part], join: Callable[..., nn.Module]) -> Self:
        """Gives the network that `join` makes of the parts' networks, named and placed as the part `first` of them."""

        def build() -> nn.Module:
            return join(**{name: part.build() for name, part in parts.items()})

        network = join(**{name: part.network for name, part in parts.items()})
        return cls(parts[first].component, parts[first].path, network, build, {}, {}, parts)

    def _fill(self, network: nn.Module, target: Target) -> None:
        for name, part in self.parts.items():
            part._fill(getattr(network, name), target)

    def digest(self, digests: Digests | None = None) -> str:
        summed = [f"{name} {part.digest(digests)}" for name, part in sorted(self.parts.items())]
        return hashlib.sha256("\n".join(summed).encode()).hexdigest()
