"""The rotary positions of Flux.1's and Chroma's tokens: text at the origin, images by rows and columns."""

from __future__ import annotations

from typing import Final

import numpy as np

from flame_train.networks.rope import Angles, Grids, grid, rope_angles

_THETA: Final = 10000.0


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """How many values of a head encode the image (0, a control image 1), the row and the column of a token."""
    each = head_dim * 7 // 16 // 2 * 2  # 56 of 128
    return head_dim - 2 * each, each, each


def position_angles(head_dim: int, text: int, grids: Grids) -> Angles:
    """The angle by which each value of a head is rotated at each token, fp64 (S, E); text stands at the origin."""
    images = [grid(*size, image=number) for number, size in enumerate(grids)]
    return rope_angles(np.concatenate([np.zeros((text, 3)), *images]), axes_of(head_dim), _THETA)
