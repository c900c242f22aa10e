"""Name tables between checkpoint layouts, as data that can be read in both directions.

A `Rule` says which tensors of one layout make which of the other, and by what rearrangement. A `KeyMap` is a set of
rules; its `inverse` is the same set backwards. So a table that loads a layout can also write it. Nothing is read from
disk here: `pull` returns for each wanted tensor a `Source`, a recipe for reading it later, one tensor at a time.

Patterns: `{p}` stands for `weight` and `bias`; `{i}`, `{j}`, `{k}` for any number, the same on both sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from flame_train.io.dtypes import Array, widened

Shape = tuple[int, ...]

_NUMBER: Final = re.compile(r"\d+")
_WILDCARD: Final = re.compile(r"\{[a-z]\}")
_PLACE: Final = re.compile(rf"{_WILDCARD.pattern}|{_NUMBER.pattern}")


class Op(Enum):
    """How a tensor is rearranged; only SCALE changes values. Comments give source -> target."""

    COPY = "copy"
    SQUEEZE = "squeeze"  # [O, I, 1, 1] -> [O, I]
    UNSQUEEZE = "unsqueeze"  # [O, I] -> [O, I, 1, 1]
    TRANSPOSE = "transpose"  # [A, B] -> [B, A]
    ROWS = "rows"  # one tensor -> n blocks of its rows, or n tensors -> one
    SIX_ROWS = "six_rows"  # [6 * A] -> [6, A]
    IN_A_ROW = "in_a_row"  # [A, B] -> [A * B]
    SWAP = "swap"  # the two halves of the rows in the other order; goes back by itself
    FLAT = "flat"  # [C, 1, 1, 1] -> [C]; only read, never written
    LAST = (
        "last"  # [O, I, T, H, W] -> [O, I, H, W], that of the last T, or as it is without T; only read, never written
    )
    TAPS = "taps"  # [O, I, T, H, W] -> [T * O, I, H, W], one T after the other; only read, never written
    SCALE = "scale"  # a tensor and a single number -> their product in fp32; only read, never written

    @property
    def inverse(self) -> Op:
        if self in _ONLY_READ:
            raise ValueError("a table with scaled tensors or parts of them has no inverse: they are read, not written")
        return _INVERSES.get(self, self)


_INVERSES: Final = {
    Op.SQUEEZE: Op.UNSQUEEZE,
    Op.UNSQUEEZE: Op.SQUEEZE,
    Op.SIX_ROWS: Op.IN_A_ROW,
    Op.IN_A_ROW: Op.SIX_ROWS,
}
_ONLY_READ: Final = (Op.FLAT, Op.LAST, Op.TAPS, Op.SCALE)


class Readable(Protocol):
    """Where a Source reads from: open weights, or anything with named arrays."""

    def read(self, name: str) -> Array: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """`source` tensors of one layout make `target` tensors of the other. One side has exactly one name.

    `shares` are the proportions of the several tensors' rows, where they are not equal.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    op: Op = Op.COPY
    shares: tuple[int, ...] = ()

    @property
    def inverse(self) -> Rule:
        return Rule(self.target, self.source, self.op.inverse, self.shares)


@dataclass(frozen=True, slots=True)
class Source:
    """How to make one tensor from those of a file: which ones, rearranged how.

    When one stored tensor holds several wanted ones, its rows are `parts` equal parts, of which this takes `span`, from
    `part` on. `shape`, if set, is the shape wanted by the model; it differs from the stored one by trailing ones only.
    """

    names: tuple[str, ...]
    op: Op = Op.COPY
    part: int = 0
    parts: int = 1
    span: int = 1
    shape: Shape | None = None

    def read(self, weights: Readable) -> Array:
        """Returns the tensor, a view of the stored one except where several are joined or one is scaled."""
        return self.apply([weights.read(name) for name in self.names])

    def apply(self, stored: Sequence[Array]) -> Array:
        """Rearranges the arrays of `names`. Shapes: see `Op`."""
        first = stored[0]
        match self.op:
            case Op.COPY:
                tensor = first
            case Op.SQUEEZE:
                tensor = first.reshape(first.shape[:2])
            case Op.UNSQUEEZE:
                tensor = first.reshape(*first.shape[:2], 1, 1)
            case Op.TRANSPOSE:
                tensor = first.T
            case Op.ROWS:
                tensor = np.concatenate(stored) if len(stored) > 1 else first[self._rows(len(first))]
            case Op.SIX_ROWS:
                tensor = first.reshape(6, -1)
            case Op.IN_A_ROW:
                tensor = first.reshape(-1)
            case Op.SWAP:
                tensor = _swapped(first)
            case Op.FLAT:
                tensor = first.reshape(-1)
            case Op.LAST:
                tensor = first[:, :, -1] if first.ndim == 5 else first
            case Op.TAPS:
                tensor = np.moveaxis(first, 2, 0).reshape(-1, first.shape[1], *first.shape[3:])
            case Op.SCALE:
                tensor = widened(first, np.float32)
                tensor *= stored[1].astype(np.float32).reshape(())
        return tensor if self.shape is None else tensor.reshape(self.shape)

    def spread(self, tensor: Array, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, slice, Array]]:
        """Yields the other way round: for each of `names`, which rows of it come from `tensor`, and their values.

        `shapes` are those of the file. ValueError where what is stored is not what is read.
        """
        if self.op in _ONLY_READ:
            raise ValueError("a scaled tensor, or a part of one, cannot be written")
        begin = 0
        for name in self.names:
            shape = shapes[name]
            match self.op:
                case Op.ROWS if len(self.names) > 1:
                    yield name, slice(None), tensor[begin : begin + shape[0]]
                    begin += shape[0]
                case Op.ROWS:
                    yield name, self._rows(shape[0]), tensor
                case Op.TRANSPOSE:
                    yield name, slice(None), tensor.T
                case Op.SWAP:
                    yield name, slice(None), _swapped(tensor)
                case _:
                    yield name, slice(None), tensor.reshape(shape)

    def _rows(self, stored: int) -> slice:
        unit = stored // self.parts
        return slice(self.part * unit, (self.part + self.span) * unit)

    def made_shape(self, shapes: Mapping[str, Shape]) -> Shape | None:
        """Returns the shape `read` will return; None when the stored shapes do not allow the rearrangement."""
        if self.shape is not None:
            return self.shape
        first, *rest = (shapes[name] for name in self.names)
        match self.op:
            case Op.SQUEEZE | Op.UNSQUEEZE:
                base, ones = first[:2], first[2:]
                if len(base) < 2 or ones not in ((), (1, 1)):
                    return None
                return base if self.op is Op.SQUEEZE else (*base, 1, 1)
            case Op.TRANSPOSE:
                return first[::-1] if len(first) == 2 else None
            case Op.ROWS:
                if not first or first[0] % self.parts or any(other[1:] != first[1:] for other in rest):
                    return None
                rows = sum(shapes[name][0] for name in self.names)
                return (rows // self.parts * self.span, *first[1:])
            case Op.SIX_ROWS:
                return (6, first[0] // 6) if len(first) == 1 and first[0] % 6 == 0 else None
            case Op.IN_A_ROW:
                return (math.prod(first),) if len(first) == 2 else None
            case Op.SWAP:
                return first if first and first[0] % 2 == 0 else None
            case Op.FLAT:
                return first[:1] if math.prod(first[1:]) == 1 else None
            case Op.LAST:
                return (*first[:2], *first[3:]) if len(first) == 5 else first if len(first) == 4 else None
            case Op.TAPS:
                return (first[2] * first[0], first[1], *first[3:]) if len(first) == 5 else None
            case Op.SCALE:
                return first if math.prod(rest[0]) == 1 else None
        return first


@dataclass(frozen=True)
class KeyMap:
    """Rules from the names of one layout (source) to those of another (target).

    `aliases` are further source names that are understood but that `inverse` never produces.
    """

    rules: tuple[Rule, ...]
    aliases: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for rule in (*self.rules, *self.aliases):
            if min(len(rule.source), len(rule.target)) != 1:
                raise ValueError(f"one side of a rule must have one name: {rule}")
        for side in ("source", "target"):
            patterns = [pattern for rule in self.rules for pattern in getattr(rule, side)]
            if len(set(patterns)) != len(patterns):
                twice = sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})
                raise ValueError(f"{side} patterns given twice: {twice}")

    @property
    def inverse(self) -> KeyMap:
        return KeyMap(tuple(rule.inverse for rule in self.rules))

    def pull(self, names: Iterable[str]) -> Pulled:
        """Finds how every target is made that `names` can make, and which names fit no rule or a half-filled one."""
        present = set(names)
        sources: dict[str, Source] = {}
        unknown: list[str] = []
        for name in sorted(present):
            targets = self._made_from(name)
            if targets is None or any(needed not in present for source in targets.values() for needed in source.names):
                unknown.append(name)
                continue
            for target, source in targets.items():
                if sources.setdefault(target, source) != source:
                    unknown.append(name)  # an alias of what is there under another name already
                    break
        return Pulled(sources, tuple(unknown))

    def _made_from(self, name: str) -> dict[str, Source] | None:
        """Finds target name -> Source for the rule that `name` belongs to, or None."""
        for places, rule in self._by_template.get(_NUMBER.sub("#", name), ()):
            numbers = _bound(places, _NUMBER.findall(name))
            if numbers is not None:
                needed = tuple(_filled(source, numbers) for source in rule.source)
                shares = rule.shares if len(rule.target) > 1 and rule.shares else (1,) * len(rule.target)
                return {
                    _filled(target, numbers): Source(needed, rule.op, sum(shares[:i]), sum(shares), shares[i])
                    for i, target in enumerate(rule.target)
                }
        return None

    @cached_property
    def _by_template(self) -> dict[str, list[tuple[list[str], Rule]]]:
        """Rules by their source names, every number and wildcard replaced, each with the replaced values."""
        by_template: dict[str, list[tuple[list[str], Rule]]] = {}
        for rule in (*self.rules, *self.aliases):
            for source in rule.source:
                by_template.setdefault(_PLACE.sub("#", source), []).append((_PLACE.findall(source), rule))
        return by_template


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a KeyMap for a list of names."""

    sources: dict[str, Source]
    unknown: tuple[str, ...] = ()


Line = tuple[str, str | tuple[str, ...], Op]
"""A line of a table: a name, the name or names that it becomes, and how."""


def lines(text: str) -> tuple[Line, ...]:
    """Gives a table's lines as text: a name, an arrow, what it becomes, and in brackets the op unless that is COPY."""
    parsed = []
    for line in text.strip().splitlines():
        source, targets = line.split("->")
        *names, last = targets.split()
        op = Op[last[1:-1].upper()] if last.startswith("[") else Op.COPY
        names += [] if last.startswith("[") else [last]
        parsed.append((source.strip(), tuple(names), op))
    return tuple(parsed)


def table(
    direct: Iterable[Line] = (),
    prefixes: Iterable[tuple[str, str, str]] = (),
    suffixes: Mapping[str, Iterable[Line]] | None = None,
) -> tuple[Rule, ...]:
    """Returns rules from whole names, and from prefixes each combined with the suffixes of the kind it names."""
    lines = list(direct)
    for source, target, kind in prefixes:
        for source_end, target_end, op in (suffixes or {})[kind]:
            ends = (target_end,) if isinstance(target_end, str) else target_end
            lines.append((source + source_end, tuple(target + end for end in ends), op))
    rules = []
    for source, target_names, op in lines:
        targets = (target_names,) if isinstance(target_names, str) else target_names
        for kind in ("weight", "bias") if "{p}" in source else ("",):
            filled = tuple(target.replace("{p}", kind) for target in targets)
            rules.append(Rule((source.replace("{p}", kind),), filled, op))
    return tuple(rules)


def scaled_fp8_rules(names: Iterable[str], plain: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns `plain`, but weights among `names` that have a factor, as in ComfyUI's scaled fp8 files, are multiplied
    by it.

    Those are read only. Their rules come first and replace a plain one for the very same name.
    """
    stems = [name.removesuffix(".scale_weight") for name in sorted(names) if name.endswith(".scale_weight")]
    scaled = [Rule((f"{stem}.weight", f"{stem}.scale_weight"), (f"{stem}.weight",), Op.SCALE) for stem in stems]
    done = {rule.target for rule in scaled}
    return (*scaled, *(rule for rule in plain if rule.target not in done))


def as_stored(names: Iterable[str]) -> KeyMap:
    """Makes the table of `names` that are native, whose weights may have a factor as in `scaled_fp8_rules`."""
    plain = (Rule((name,), (name,)) for name in names if not name.endswith(".scale_weight"))
    return KeyMap(scaled_fp8_rules(names, plain))


def _swapped(x: Array) -> Array:
    half = len(x) // 2
    return np.concatenate([x[half:], x[:half]])


def _bound(places: Sequence[str], numbers: Sequence[str]) -> dict[str, str] | None:
    """Gives the number that each wildcard stands for; None if a name with these numbers fits no pattern's places."""
    pairs = list(zip(places, numbers, strict=False))
    if len(places) != len(numbers) or any(place[0] != "{" and place != number for place, number in pairs):
        return None
    return dict(pairs)


def _filled(pattern: str, numbers: Mapping[str, str]) -> str:
    return _WILDCARD.sub(lambda match: numbers[match[0]], pattern)
