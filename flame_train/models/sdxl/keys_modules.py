"""The modules of SDXL base that a LoRA can sit on, generated from its architecture.

Linear layers and convolutions only, by native path. Attention is at the second and third level, with 2 and
10 transformer blocks; the middle has 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_RESNETS: Final = 2
_DEPTHS: Final = (0, 2, 10)
_CLIP_L_LAYERS: Final = 12
_BIGG_LAYERS: Final = 32

_RESNET: Final = ("in_layers.2", "emb_layers.1", "out_layers.3")
_BLOCK: Final = (
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)
_TEXT_LAYER: Final = (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")


def base_modules() -> dict[str, tuple[str, ...]]:
    """Component -> native module paths: 794 in the UNet, 72 in CLIP-L, 193 in bigG (with its projection)."""
    return {
        "unet": tuple(_unet()),
        "text_encoder": clip_modules(_CLIP_L_LAYERS),
        "text_encoder_2": (*clip_modules(_BIGG_LAYERS), "text_projection"),
    }


def _unet() -> Iterator[str]:
    yield from ("time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2", "input_blocks.0.0")
    yield from _down()
    yield from _resnet("middle_block.0", skip=False)
    yield from _attention("middle_block.1", _DEPTHS[-1])
    yield from _resnet("middle_block.2", skip=False)
    yield from _up()
    yield "out.2"


def _down() -> Iterator[str]:
    block = 1
    for level, depth in enumerate(_DEPTHS):
        for number in range(_RESNETS):
            # the first level keeps the channel count; each later one changes it in its first resnet
            yield from _resnet(f"input_blocks.{block}.0", skip=level > 0 and number == 0)
            yield from _attention(f"input_blocks.{block}.1", depth)
            block += 1
        if level + 1 < len(_DEPTHS):
            yield f"input_blocks.{block}.0.op"
            block += 1


def _up() -> Iterator[str]:
    block = 0
    for level, depth in reversed(list(enumerate(_DEPTHS))):
        for _ in range(_RESNETS + 1):
            yield from _resnet(f"output_blocks.{block}.0", skip=True)  # its input is joined with the way down's
            yield from _attention(f"output_blocks.{block}.1", depth)
            block += 1
        if level > 0:
            yield f"output_blocks.{block - 1}.{2 if depth else 1}.conv"


def _resnet(prefix: str, *, skip: bool) -> Iterator[str]:
    yield from (f"{prefix}.{part}" for part in _RESNET)
    if skip:
        yield f"{prefix}.skip_connection"


def _attention(prefix: str, depth: int) -> Iterator[str]:
    if depth:
        yield from (f"{prefix}.proj_in", f"{prefix}.proj_out")
    for block in range(depth):
        yield from (f"{prefix}.transformer_blocks.{block}.{part}" for part in _BLOCK)


def clip_modules(layers: int) -> tuple[str, ...]:
    """The linear layers of a CLIP text encoder's blocks."""
    return tuple(f"text_model.encoder.layers.{layer}.{part}" for layer in range(layers) for part in _TEXT_LAYER)
