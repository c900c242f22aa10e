"""The sizes of a transformer of double and single blocks, as Flux.1, Chroma and FLUX.2 have; positions of its tokens.

Text stands at the origin, images by rows and columns (Flux.1 and Chroma).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flame_train.networks.arch import Shapes, TransformerArch, block_count
from flame_train.networks.rope import Angles, Grids, grid, rope_angles


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSingleArch(TransformerArch):
    """`depth` counts the blocks with a stream for the image and one for the text."""

    single_depth: int
    """Blocks with one stream for image and text."""


def block_sizes(shape: Callable[[Shapes, str], tuple[int, ...]], shapes: Shapes) -> dict[str, int]:
    """Returns the sizes that names and shapes of the blocks tell, by field; `shape` raises for a missing tensor."""
    return {
        "width": shape(shapes, "img_in.weight")[0],
        "depth": block_count(shapes, "double_blocks"),
        "single_depth": block_count(shapes, "single_blocks"),
        "head_dim": shape(shapes, "double_blocks.0.img_attn.norm.query_norm.scale")[0],
        "context_dim": shape(shapes, "txt_in.weight")[1],
    }


_THETA: Final = 10000.0


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """Returns how many values of a head encode the image (0, a control image 1), the row and the column of a token."""
    each = head_dim * 7 // 16 // 2 * 2  # 56 of 128
    return head_dim - 2 * each, each, each


def position_angles(head_dim: int, text: int, grids: Grids) -> Angles:
    """Returns the angle by which each value of a head is rotated at each token, fp64 (S, E); text is at the origin."""
    images = [grid(*size, image=number) for number, size in enumerate(grids)]
    return rope_angles(np.concatenate([np.zeros((text, 3)), *images]), axes_of(head_dim), _THETA)
