"""The rotary positions of Flux.1's and Chroma's tokens: text at the origin, the image by rows and columns."""

from __future__ import annotations

from typing import Final

from flame_train.models.common.rope import Angles, rope_angles, text_and_grid

_THETA: Final = 10000.0


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """How many values of a head encode the image (always 0 here), the row and the column of a token."""
    each = head_dim * 7 // 16 // 2 * 2  # 56 of 128
    return head_dim - 2 * each, each, each


def position_angles(head_dim: int, text: int, rows: int, columns: int) -> Angles:
    """The angle by which each value of a head is rotated at each token, fp64 (S, E); text stands at the origin."""
    return rope_angles(text_and_grid(text, rows, columns), axes_of(head_dim), _THETA)
