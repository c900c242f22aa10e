"""Images among the tokens that a Qwen-VL's text half reads: their places, their features and everyone's positions.

Shape letters: B batch, T token positions, M tokens of an image, C channels, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.errors import ShapeError

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Images whose placeholders stand at the same places in every row of a batch.

    Raises ShapeError where these are not as many, or images overlap.
    """

    starts: tuple[int, ...]
    """Where in the ids each image's placeholders begin, in order."""
    grids: tuple[Grid, ...]
    features: tuple[tuple[Tensor, ...], ...]
    """What the vision tower returned for each image: (B, M, C), of the last block and of each tap."""

    def __post_init__(self) -> None:
        counts = len(self.starts), len(self.grids), len(self.features)
        if len(set(counts)) != 1:
            raise ShapeError(f"ImageTokens: expected a start, a grid and features for each image, got {counts} of them")
        ends = (0, *(end for _, end in self.spans))
        if any(start < end for start, end in zip(self.starts, ends, strict=False)):
            raise ShapeError(f"ImageTokens: expected images in order that do not overlap, got {self.spans}")
        if len({len(features) for features in self.features}) > 1:
            raise ShapeError("ImageTokens: expected features of as many taps for each image")

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each image's placeholders."""
        return [(start, start + rows * columns) for start, (rows, columns) in zip(self.starts, self.grids, strict=True)]

    def placed(self, h_BTC: Tensor) -> Tensor:
        """Returns the embeddings with the images' features at the placeholders' places."""
        return self._joined(h_BTC, [features[0].to(h_BTC.dtype) for features in self.features])

    def added(self, h_BTC: Tensor, layer: int) -> Tensor:
        """Returns the states after `layer` layers, with that tap's features added to the images' (DeepStack).

        As they are where there is no such tap.
        """
        if not any(layer < len(features) for features in self.features):
            return h_BTC
        pairs = zip(self.spans, self.features, strict=True)
        return self._joined(h_BTC, [h_BTC[:, begin:end] + features[layer] for (begin, end), features in pairs])

    def _joined(self, h_BTC: Tensor, images: list[Tensor]) -> Tensor:
        """Returns (B, T, C) with the `images` at their places. Raises ShapeError where they have no room."""
        B, T, C = h_BTC.shape
        parts, done = [], 0
        for (begin, end), image_BMC in zip(self.spans, images, strict=True):
            if end > T or tuple(image_BMC.shape) != (B, end - begin, C):
                raise ShapeError(
                    f"ImageTokens: expected features ({B}, {end - begin}, {C}) that end by {T}, "
                    f"got {tuple(image_BMC.shape)} from {begin} on"
                )
            parts += [h_BTC[:, done:begin], image_BMC]
            done = end
        return F.cat([part for part in (*parts, h_BTC[:, done:]) if part.shape[1]], dim=1)


def positions(length: int, starts: tuple[int, ...], grids: tuple[Grid, ...]) -> _Array:
    """Returns the position of each token on three axes, (T, 3): time, row, column.

    A text's tokens count on all of them. An image's tokens share the time of its first, from which its rows and columns
    count. The text behind it goes on after the larger of the two.
    """
    parts: list[_Array] = []
    done = place = 0
    for start, (rows, columns) in zip(starts, grids, strict=True):
        place = _count(parts, place, start - done)
        image = np.full((rows, columns, 3), place)
        image[..., 1] += np.arange(rows)[:, None]
        image[..., 2] += np.arange(columns)
        parts.append(image.reshape(-1, 3))
        place, done = place + max(rows, columns), start + rows * columns
    _count(parts, place, length - done)
    return np.concatenate(parts)


def _count(found: list[_Array], place: int, tokens: int) -> int:
    """Adds a text's positions to `found`; returns the next one."""
    found.append(np.repeat(np.arange(place, place + tokens)[:, None], 3, axis=1))
    return place + tokens


def interleaved_axes(sections: tuple[int, int, int], frequencies: int) -> _Array:
    """Returns the axis that each of a head's frequencies follows in Qwen3-VL (arXiv 2511.21631).

    Rows and columns have them in turn, with one for time before each two, until they have as many as `sections` says.
    Time has the rest. In Qwen2.5-VL each axis has its own in a row.
    """
    axes = np.zeros(frequencies, int)
    for i in (1, 2):
        axes[i : 3 * sections[i] : 3] = i
    return axes


def image_angles(positions_T3: _Array, theta: float, axes: _Array) -> _Array:
    """Returns each number's rotary angle at each token, fp64 (T, E): pairs lie half a head apart."""
    frequencies = theta ** (-np.arange(len(axes)) / len(axes))
    return np.tile(positions_T3[:, axes] * frequencies, 2)
