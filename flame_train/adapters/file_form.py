"""How the arrays of one adapter kind lie in LoRA files: a value that the kind declares, and this module interprets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from .factors import Array, Factors, LoraFactors
from .folding import fold, unfold
from .qkv_split import Paths, check_splittable, join, split

DOWN: Final = "down"
UP: Final = "up"
ALPHA: Final = "alpha"
_LARGEST: Final = float(np.finfo(np.float32).max)

Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """An array beside LoRA's pair with one number for each output row, which is cut and joined as the rows are.

    Attributes:
        array: its name.
        plural: what messages call the numbers.
        suffix: how its name ends in diffusers' files.
        setting: the key of `[lora]` that chooses numbers of rows.
        otherwise: what the numbers are without it; diffusers does not read these.
    """

    array: str
    plural: str
    suffix: str
    setting: str
    otherwise: str

    def are_in(self, factors: Factors) -> bool:
        """Says whether the array has numbers of rows."""
        return are_of_rows(factors.arrays[self.array].shape, factors.weight_shape[0])


def are_of_rows(shape: tuple[int, ...], out: int) -> bool:
    """Says whether an array of this shape has a number for each of a weight's `out` rows, along the first axis."""
    return shape[:1] == (out,) and math.prod(shape) == out


@dataclass(frozen=True, slots=True)
class FileForm:
    """The names and shapes of a kind's tensors in every format.

    A kind with arrays "down" and "up" has LoRA's pair, and only such a kind is read by diffusers. A pair can be cut
    into parts. Its "up" takes up the alpha that a file has no place for.

    Attributes:
        title: what messages call the kind.
        suffixes: how its tensors' names end in files, in any dialect, and the array that each is. Kohya's files have
            the first of each array, and an alpha if there is a suffix for it.
        factors: makes the factors from arrays that fit together, and an alpha.
        array_problem: says what is wrong with the shapes of a module's arrays; empty if they fit together.
        inner: of these arrays, the first that is there has the rank as its first size.
        network_args: what `ss_network_args` say of the kind; with an "algo" the file is of LyCORIS' kinds.
        rows: numbers of output rows beside the pair.
    """

    title: str
    suffixes: Mapping[str, str]
    factors: Callable[[Arrays, float], Any]
    array_problem: Callable[[Arrays], str]
    inner: tuple[str, ...] = ()
    network_args: Mapping[str, str] = field(default_factory=dict)
    rows: RowNumbers | None = None

    @property
    def written(self) -> Mapping[str, str]:
        """The arrays, and how the name of each ends in kohya's files."""
        names: dict[str, str] = {}
        for suffix, array in self.suffixes.items():
            names.setdefault(array, suffix)
        return names

    @property
    def has_pair(self) -> bool:
        """Whether the kind has LoRA's pair of matrices."""
        return UP in self.written

    def format_problem(self, form: str, kind: object) -> str:
        """Says why a file in `form` cannot hold what is trained by the settings `kind`; empty if it can."""
        if form == "kohya" or (getattr(kind, self.rows.setting) if self.rows else self.has_pair):
            return ""
        what = self.rows.otherwise if self.rows else self.title
        advice = f"; or set lora.{self.rows.setting} = true" if self.rows else ""
        return f'expected "kohya" with {what}, which diffusers does not read, got "{form}"{advice}'

    def args_of(self, modules: Iterable[Factors]) -> dict[str, str]:
        """Returns the `ss_network_args` of a file with these factors; numbers of rows where all are."""
        rows = self.rows
        of_rows = {rows.setting: str(all(rows.are_in(factors) for factors in modules))} if rows else {}
        return {**self.network_args, **of_rows}

    def problem(self, arrays: Arrays) -> str:
        """Says what is wrong with a module's arrays as read from a file; empty if they fit together."""
        mixed = "" if arrays.keys() <= self.written.keys() else f"is of several kinds: it has {', '.join(arrays)}"
        return self.array_problem(arrays) or alpha_problem(arrays) or mixed

    def read(self, arrays: Arrays, folded: float | None, scale: float) -> Any:
        """Makes the factors of a module's arrays, in which there is no problem.

        Args:
            arrays: the arrays, an alpha among them or not.
            folded: the alpha before it was folded, as the file's metadata says. The update is the same for any.
            scale: alpha / rank by the file's configuration, for a pair without an alpha of its own.
        """
        matrices = {name: arrays[name] for name in self.written if name in arrays}
        alpha = matrices.pop(ALPHA, None)
        rank = next((len(arrays[name]) for name in self.inner if name in arrays), 1)
        written = float(rank) if alpha is None else float(alpha.reshape(()))
        if self.has_pair and folded is not None:
            pair = unfold(arrays[DOWN], arrays[UP], folded, written)
            return self.factors({**matrices, **pair.arrays}, pair.alpha)
        return self.factors(matrices, written * scale if self.has_pair and alpha is None else written)

    def kohya(self, factors: Factors) -> dict[str, Array]:
        """Returns a module's tensors by what follows its name in kohya's files."""
        suffix, arrays = self.written, factors.arrays
        tensors = {suffix[name]: array for name, array in arrays.items()}
        if ALPHA in suffix:
            tensors[suffix[ALPHA]] = _scalar(factors.alpha, next(iter(arrays.values())).dtype)
        return tensors

    def diffusers(self, factors: Factors, paths: Paths) -> dict[str, tuple[dict[str, Array], LoraFactors]]:
        """Returns a module's tensors by path and by what follows it in diffusers' files, with the LoRA of that path.

        alpha / rank is folded into `lora_B`, because several loaders refuse an alpha. ValueError, saying what it is,
        for an adapter that diffusers does not read.
        """
        if not self.has_pair:
            raise ValueError(f'an adapter of kind "{factors.kind}", which diffusers does not read')
        if self.rows and not self.rows.are_in(factors):
            raise ValueError(f"a {self.title} with {self.rows.otherwise}, which files of diffusers cannot hold")
        tensors = {}
        for path, part in split(pair_of(factors.arrays, factors.alpha), paths, blocks=self.rows is None).items():
            tensors[path] = {".lora_A.weight": part.down, ".lora_B.weight": fold(part)}, part
            if self.rows:
                numbers = paths[path].apply([factors.arrays[self.rows.array]])
                tensors[path][0][self.rows.suffix] = _peft_shape(numbers)
        return tensors

    def with_alpha(self, factors: Any, alpha: float) -> Any:
        """Returns the same update with another alpha, or `factors` where no array takes up the ratio."""
        if not self.has_pair:
            return factors
        return self.factors({**factors.arrays, UP: fold(pair_of(factors.arrays, factors.alpha), alpha)}, alpha)

    def join(self, parts: Mapping[str, Any], paths: Paths) -> Any:
        """Returns a module's factors from its parts by path; an empty path is the whole.

        ValueError if they do not fit.
        """
        if "" in parts:
            if self.has_pair:
                check_splittable(pair_of(parts[""].arrays, parts[""].alpha), paths)
            return parts[""]
        if not self.has_pair:
            raise ValueError(f"a {self.title} of parts of a layer has no {self.title} of the whole")
        rows = self.rows
        if rows and any(path not in parts or not rows.are_in(parts[path]) for path in paths):
            raise ValueError(f"a {self.title} of some parts of a layer has no {rows.plural} for the whole")
        pair = join({path: pair_of(part.arrays, part.alpha) for path, part in parts.items()}, paths)
        arrays = dict(pair.arrays)
        if rows:
            numbers = [parts[path].arrays[rows.array] for path in paths]
            if len(paths) == 1:
                numbers = [source.apply(numbers) for source in paths.values()]  # exchanging halves undoes itself
            arrays[rows.array] = np.concatenate(numbers)
        return self.factors(arrays, pair.alpha)


def pair_of(arrays: Arrays, alpha: float) -> LoraFactors:
    """Returns LoRA's pair among the arrays of a kind that has one."""
    return LoraFactors(arrays[DOWN], arrays[UP], alpha)


def alpha_problem(arrays: Arrays) -> str:
    """Says what is wrong with the alpha among a module's arrays; empty without one."""
    alpha = arrays.get(ALPHA)
    if alpha is None or (alpha.size == 1 and abs(float(alpha.reshape(()))) <= _LARGEST):
        return ""
    return "has an alpha that is not one finite number"


def _scalar(alpha: float, dtype: np.dtype[Any]) -> Array:
    """Returns a scalar in the weights' dtype, as other writers have it, or in fp32 where that would change it."""
    with np.errstate(over="ignore"):
        rounded = np.array(alpha, dtype)
    return rounded if float(rounded) == alpha else np.array(alpha, np.float32)


def _peft_shape(numbers: Array) -> Array:
    """Returns (out,) for a linear layer; (1, out, 1, 1) for a convolution."""
    return numbers.reshape(-1) if numbers.ndim == 2 else numbers.reshape(1, -1, 1, 1)
