"""The networks of Qwen-Image 2.1 and 1 as diffusers has them, for the comparison with PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from benchmarks.torch_baseline import Batch, Lengths, Predict, TorchBaseline, flow_step, sizes_of, velocity
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage1.transformer import QwenImage1Arch

_JOINT = r"to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out"
_TARGETS_1 = rf"transformer_blocks\.\d+\.(attn\.({_JOINT})|(img|txt)_mlp\.net\.(0\.proj|2))"
_TARGETS = r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0)|img_mlp\.(gate_layer|proj|out))"


def qwenimage(arch: QwenImageArch, length: Lengths) -> TorchBaseline:
    """Returns the counterpart of a network of this architecture, with captions of this length."""
    text = length["qwen3"]
    arguments = {
        "in_channels": arch.channels,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "context_in_dim": arch.text_dim,
        "mlp_ratio": arch.hidden // arch.width,
        "axes_dims_rope": arch.axes,
    }

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        tokens = batch.side**2
        latents = batch.tokens(arch.channels)
        # one for four tokens of the image
        slots = batch.torch.arange(text + tokens // 4, device=batch.like["device"]) >= text
        predict = velocity(
            encoder_hidden_states=batch.randn(text, arch.text_dim),
            img_shapes=[[(1, batch.side, batch.side)]] * batch.size,
            img_mask=slots.expand(batch.size, -1),
        )
        return latents, lambda transformer, x, t: predict(transformer, x, t)[:, -tokens:]

    network, blocks = "QwenImage21Transformer2DModel", ("QwenImage21TransformerBlock",)
    return TorchBaseline(network, arguments, _TARGETS, blocks, flow_step(inputs), tables=_tables)


def qwenimage1(arch: QwenImage1Arch, length: Lengths, controls: int = 0) -> TorchBaseline:
    """Returns the counterpart of a network of version 1, with captions of this length, and control images."""
    text = length["qwen3"]
    arguments = {
        "in_channels": 4 * arch.channels,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "joint_attention_dim": arch.text_dim,
        "axes_dims_rope": arch.axes,
        "zero_cond_t": bool(arch.zero_cond),
    }

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        latents, shown = batch.tokens(4 * arch.channels), [batch.tokens(4 * arch.channels) for _ in range(controls)]
        predict = velocity(
            encoder_hidden_states=batch.randn(text, arch.text_dim),
            encoder_hidden_states_mask=batch.seen(text),
            img_shapes=[[(1, batch.side, batch.side)] * (1 + controls)] * batch.size,
        )

        def beside(transformer: Any, x: Any, t: Any) -> Any:
            return predict(transformer, batch.torch.cat([x, *shown], dim=1), t)[:, : x.shape[1]]

        return latents, beside if controls else predict

    network, blocks = "QwenImageTransformer2DModel", ("QwenImageTransformerBlock",)
    return TorchBaseline(
        network,
        arguments,
        _TARGETS_1,
        blocks,
        flow_step(inputs),
        tables=_tables,
        with_controls=partial(qwenimage1, arch, length),
    )


def _tables(transformer: Any) -> None:
    """Rotary angles, which the network keeps beside its buffers."""
    rotary = transformer.pos_embed
    scaled = {"scale_rope": rotary.scale_rope} if hasattr(rotary, "scale_rope") else {}
    transformer.pos_embed = type(rotary)(theta=rotary.theta, axes_dim=rotary.axes_dim, **scaled)


BASELINES: Final = {"qwenimage": qwenimage, "qwenimage1": qwenimage1}
