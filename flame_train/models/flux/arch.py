"""What decides the shapes of a transformer of double and single blocks: Flux.1, Chroma and FLUX.2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flame_train.networks.arch import TransformerArch
from flame_train.networks.files.shapes import Shapes, block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSingleArch(TransformerArch):
    """`depth` counts the blocks with a stream for the image and one for the text."""

    single_depth: int
    """Blocks with one stream for image and text."""


def block_sizes(shape: Callable[[Shapes, str], tuple[int, ...]], shapes: Shapes) -> dict[str, int]:
    """The sizes that names and shapes of the blocks tell, by field. `shape` raises for a tensor that is missing."""
    return {
        "width": shape(shapes, "img_in.weight")[0],
        "depth": block_count(shapes, "double_blocks"),
        "single_depth": block_count(shapes, "single_blocks"),
        "head_dim": shape(shapes, "double_blocks.0.img_attn.norm.query_norm.scale")[0],
        "context_dim": shape(shapes, "txt_in.weight")[1],
    }
