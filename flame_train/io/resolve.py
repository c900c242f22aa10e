"""Which tensor of a file is which part of a model: components, their layouts, and the fit to a model.

All problems are collected before an error is raised, so that a user sees them at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flame_train.io.keymap import KeyMap, Pulled, Shape, Source


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a component's tensors may be named.

    `marker` is part of a name that no other layout of the component has. `keymap` makes the table to native
    names, for the names at hand: a table may depend on how deep the model is. None: they are native.
    """

    name: str
    marker: str
    keymap: Callable[[Collection[str]], KeyMap] | None = None


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a model: where its tensors are found in a file, and under which layouts.

    `duplicates` names tensors that repeat another: they are ignored where that other is there too.
    """

    name: str
    prefixes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    ignored: re.Pattern[str]
    duplicates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The file's tensors by component and native name, and the remaining ones."""

    sources: dict[str, dict[str, Source]]
    layouts: dict[str, str]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def resolve(
    components: Sequence[Component], names: Iterable[str], only: str | None = None, idle: re.Pattern[str] | None = None
) -> Resolved:
    """Sort the names of a file into components and find how each native tensor is read.

    `only` says that the file holds that one component, whose names may then stand without a prefix. Names that the
    pattern `idle` fits play no part in any component.
    """
    every = sorted(names)
    set_aside = [name for name in every if idle is not None and idle.fullmatch(name)]
    remaining = sorted(set(every).difference(set_aside))
    sources: dict[str, dict[str, Source]] = {}
    layouts: dict[str, str] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    for component in components:
        if only not in (None, component.name):
            continue
        prefix = next((p for p in component.prefixes if any(name.startswith(p) for name in remaining)), None)
        if prefix is None and only is None:
            continue
        prefix = prefix or ""
        names_of_part = [name for name in remaining if name.startswith(prefix)]
        remaining = [name for name in remaining if not name.startswith(prefix)]
        twice = {prefix + name for name, other in component.duplicates.items() if prefix + other in names_of_part}
        used = [n for n in names_of_part if n not in twice and not component.ignored.fullmatch(n, len(prefix))]
        ignored += sorted(set(names_of_part) - set(used))
        pulled, layouts[component.name] = _pull(component, [name[len(prefix) :] for name in used])
        sources[component.name] = {
            target: replace(source, names=tuple(prefix + name for name in source.names))
            for target, source in pulled.sources.items()
        }
        unknown += [prefix + name for name in pulled.unknown]
    return Resolved(sources, layouts, (*ignored, *set_aside), (*unknown, *remaining))


def _pull(component: Component, names: Collection[str]) -> tuple[Pulled, str]:
    for layout in component.layouts:
        if any(layout.marker in name for name in names):
            if layout.keymap is None:
                return Pulled({name: Source((name,)) for name in names}), layout.name
            return layout.keymap(names).pull(names), layout.name
    return Pulled({}, tuple(names)), "unknown"


def native_shapes(sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns native name -> shape, from the file's `shapes`; left out are those whose rearrangement is impossible."""
    native = {name: source.made_shape(shapes) for name, source in sources.items()}
    return {name: shape for name, shape in native.items() if shape is not None}


@dataclass(frozen=True, slots=True)
class Fit:
    """A component's sources held against what the model expects. Wrong when the last three are not empty."""

    sources: dict[str, Source]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: tuple[tuple[str, Shape, Shape | None], ...]  # name, expected, found


def fit(sources: Mapping[str, Source], shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> Fit:
    """Compares `shapes` of the file with `expected` by native name; a linear and a 1x1 convolution may swap."""
    fitting: dict[str, Source] = {}
    misshaped: list[tuple[str, Shape, Shape | None]] = []
    for name, source in sources.items():
        shape = expected.get(name)
        if shape is None:
            continue
        file_shape = source.made_shape(shapes)
        if file_shape == shape:
            fitting[name] = source
        elif file_shape is not None and _without_ones(file_shape) == _without_ones(shape):
            fitting[name] = replace(source, shape=shape)
        else:
            misshaped.append((name, shape, file_shape))
    missing = tuple(name for name in expected if name not in sources)
    unexpected = tuple(name for name in sources if name not in expected)
    return Fit(fitting, missing, unexpected, tuple(misshaped))


def _without_ones(shape: Shape) -> Shape:
    return shape[:-2] if len(shape) == 4 and shape[-2:] == (1, 1) else shape
