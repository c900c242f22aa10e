"""Control images: what a model takes of them, and their arrays among those of an example.

A control image is looked at while another one is made: its tokens are clean, have positions of their own, and get no
loss. Its array is the mean of its latents, in the scale of the denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flame_train.data.buckets import Placement, Size

_CONTROL = "control"
_T = TypeVar("_T")


def by_name(arrays: Iterable[_T]) -> dict[str, _T]:
    """Returns the arrays of an example's control images, in order, by the names that they have in it."""
    return {f"{_CONTROL}{number}": array for number, array in enumerate(arrays, 1)}


def controls_of(arrays: Mapping[str, _T]) -> tuple[_T, ...]:
    """Returns the control images among the arrays of an example or a batch, in order."""
    count = sum(name.startswith(_CONTROL) for name in arrays)
    return tuple(arrays[name] for name in by_name(range(count)))


def as_they_are(size: Size, resolution: int) -> Placement:
    """Returns a placement neither scaled nor cropped."""
    return Placement(size, size, size, 0, 0)


@dataclass(frozen=True, slots=True)
class ControlRule:
    """Which control images a model takes.

    Attributes:
        without: why it takes none; empty: it takes some.
        most: how many it takes at most; 0: any number.
        placed: scale and crop of a control image of a size (height, width) in pixels, for sampling at a resolution.
            Raises DataError for one that is too small.
    """

    without: str = ""
    most: int = 0
    placed: Callable[[Size, int], Placement] = as_they_are

    def problem(self, count: int) -> str:
        """Says why the model does not take so many control images; empty if it does."""
        if count and self.without:
            return self.without
        if 0 < self.most < count:
            return f"expected at most {self.most} control image for this model, got {count}"
        return ""
