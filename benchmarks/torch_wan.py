"""Wan 2.2's network as diffusers has it, for the comparison with PyTorch: tokens of a still or clip have one time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks.torch_baseline import Batch, Lengths, Predict, TorchBaseline, flow_step, sizes_of, velocity
from flame_train.models.wan.transformer import WanArch

_TARGETS = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
_DOWNSCALE = 16  # pixels a side that a latent pixel stands for
_STRIDE = 4  # frames that one of latents stands for, after the first


def wan(arch: WanArch, length: Lengths, frames: int = 1, height: int | None = None) -> TorchBaseline:
    """Returns the counterpart of a network of this architecture, with captions of this length, for such clips."""
    arguments = {
        "in_channels": arch.channels,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "ffn_dim": arch.hidden,
        "text_dim": arch.text_dim,
    }

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        rows, columns = ((side or batch.resolution) // _DOWNSCALE for side in (height, None))
        predict = velocity(encoder_hidden_states=batch.randn(length["t5"], arch.text_dim))
        latents = batch.randn(arch.channels, 1 + (frames - 1) // _STRIDE, rows, columns)
        return latents, lambda transformer, x, t: predict(transformer, x, t * 1000)

    blocks = ("WanTransformerBlock",)
    made = TorchBaseline("WanTransformer3DModel", arguments, _TARGETS, blocks, flow_step(inputs))
    return replace(made, with_frames=partial(wan, arch, length))


BASELINES: Final = {"wan": wan}
