"""The networks of Qwen-Image 2.1 and 1 as diffusers has them, for the comparison with PyTorch."""

from __future__ import annotations

from typing import Any

from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage1.transformer import QwenImage1Arch

from .torch_baseline import Loss, TorchBaseline, flow_loss

_JOINT = r"to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out"
_TARGETS_1 = rf"transformer_blocks\.\d+\.(attn\.({_JOINT})|(img|txt)_mlp\.net\.(0\.proj|2))"
_TARGETS = r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0)|img_mlp\.(gate_layer|proj|out))"


def qwenimage(arch: QwenImageArch, text: int) -> TorchBaseline:
    """The counterpart of a network of this architecture, with so many tokens of text."""
    arguments = {
        "in_channels": arch.channels,
        "out_channels": arch.channels,
        "num_layers": arch.depth,
        "attention_head_dim": arch.head_dim,
        "num_attention_heads": arch.width // arch.head_dim,
        "context_in_dim": arch.text_dim,
        "mlp_ratio": arch.hidden // arch.width,
        "axes_dims_rope": arch.axes,
    }

    def prepare(torch: Any, size: int, resolution: int, like: dict[str, Any]) -> Loss:
        side = resolution // 16
        tokens = side * side
        latents = torch.randn(size, tokens, arch.channels, **like)
        slots = torch.arange(text + tokens // 4, device=like["device"]) >= text  # one for four tokens of the image
        given = {
            "encoder_hidden_states": torch.randn(size, text, arch.text_dim, **like),
            "img_shapes": [[(1, side, side)]] * size,
            "img_mask": slots.expand(size, -1),
            "return_dict": False,
        }

        def loss(torch: Any, transformer: Any) -> Any:
            def predict(x: Any, t: Any) -> Any:
                return transformer(hidden_states=x, timestep=t, **given)[0][:, -tokens:]

            return flow_loss(torch, latents, predict)

        return loss

    network, blocks = "QwenImage21Transformer2DModel", ("QwenImage21TransformerBlock",)
    return TorchBaseline(network, arguments, _TARGETS, blocks, prepare, tables=_tables)


def qwenimage1(arch: QwenImage1Arch, text: int) -> TorchBaseline:
    """The counterpart of a network of version 1, with so many tokens of text."""
    arguments = {
        "in_channels": 4 * arch.channels,
        "out_channels": arch.channels,
        "num_layers": arch.depth,
        "attention_head_dim": arch.head_dim,
        "num_attention_heads": arch.width // arch.head_dim,
        "joint_attention_dim": arch.text_dim,
        "axes_dims_rope": arch.axes,
    }

    def prepare(torch: Any, size: int, resolution: int, like: dict[str, Any]) -> Loss:
        side = resolution // 16
        latents = torch.randn(size, side * side, 4 * arch.channels, **like)
        given = {
            "encoder_hidden_states": torch.randn(size, text, arch.text_dim, **like),
            "encoder_hidden_states_mask": torch.ones(size, text, dtype=torch.bool, device=like["device"]),
            "img_shapes": [[(1, side, side)]] * size,
            "return_dict": False,
        }

        def loss(torch: Any, transformer: Any) -> Any:
            return flow_loss(torch, latents, lambda x, t: transformer(hidden_states=x, timestep=t, **given)[0])

        return loss

    network, blocks = "QwenImageTransformer2DModel", ("QwenImageTransformerBlock",)
    return TorchBaseline(network, arguments, _TARGETS_1, blocks, prepare, tables=_tables)


def _tables(transformer: Any) -> None:
    """Rotary angles, which the network keeps beside its buffers."""
    rotary = transformer.pos_embed
    scaled = {"scale_rope": rotary.scale_rope} if hasattr(rotary, "scale_rope") else {}
    transformer.pos_embed = type(rotary)(theta=rotary.theta, axes_dim=rotary.axes_dim, **scaled)
