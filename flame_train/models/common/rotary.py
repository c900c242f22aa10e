"""Rotary angles (arXiv 2104.09864) of tokens that have a place on several axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def rotary_angles(places: np.ndarray[Any, Any], axes: Sequence[int], theta: float) -> np.ndarray[Any, Any]:
    """The angle by which each number of a head is turned, fp64 (S, E), for places (S, number of axes).

    An axis has some of the head's numbers, as `axes` says, with frequencies theta^(-2i / their number); two neighbours
    share one.
    """
    turns = [np.outer(places[:, i], theta ** (-np.arange(0, n, 2) / n)) for i, n in enumerate(axes)]
    return np.repeat(np.concatenate(turns, axis=1), 2, axis=1)


def text_and_grid(text: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Places (text + rows * columns, 3): a text's tokens at the origin, then an image's at (0, row, column)."""
    places = np.zeros((text + rows * columns, 3))
    places[text:, 1] = np.repeat(np.arange(rows), columns)
    places[text:, 2] = np.tile(np.arange(columns), rows)
    return places
