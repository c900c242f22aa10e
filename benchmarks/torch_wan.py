"""Wan 2.2's network as diffusers has it, for the comparison with PyTorch: a still, whose tokens all have one time."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.torch_baseline import Batch, Lengths, Predict, TorchBaseline, flow_step, sizes_of, velocity
from flame_train.models.wan.transformer import WanArch

_TARGETS = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
_DOWNSCALE = 16  # pixels a side that a latent pixel stands for


def wan(arch: WanArch, length: Lengths) -> TorchBaseline:
    """Returns the counterpart of a network of this architecture, with captions of this length."""
    arguments = {
        "in_channels": arch.channels,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "ffn_dim": arch.hidden,
        "text_dim": arch.text_dim,
    }

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        side = batch.resolution // _DOWNSCALE
        predict = velocity(encoder_hidden_states=batch.randn(length["t5"], arch.text_dim))
        latents = batch.randn(arch.channels, 1, side, side)
        return latents, lambda transformer, x, t: predict(transformer, x, t * 1000)

    blocks = ("WanTransformerBlock",)
    return TorchBaseline("WanTransformer3DModel", arguments, _TARGETS, blocks, flow_step(inputs))


BASELINES: Final = {"wan": wan}
