"""The networks of FLUX.2 and FLUX.3 as diffusers has them, for the comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from benchmarks.torch_baseline import Batch, Lengths, Predict, TorchBaseline, flow_step, sizes_of, velocity
from flame_train.models.flux2.transformer import Flux2Arch
from flame_train.models.flux3.transformer import Flux3Arch

_JOINT = r"to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out"
_TARGETS = (
    rf"transformer_blocks\.\d+\.(attn\.({_JOINT})|ff(_context)?\.linear_(in|out))"
    r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
)
_TARGETS_3 = (
    r"(mode_blocks\.image|txt_mode_blocks|single_transformer_blocks)\.\d+"
    r"\.(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.linear_(in|out))"
)


def flux2(arch: Flux2Arch, length: Lengths) -> TorchBaseline:
    """Returns the counterpart of a network of this architecture, with captions of this length."""
    blocks = "Flux2TransformerBlock", "Flux2SingleTransformerBlock"
    given = {"guidance_embeds": arch.guidance}
    text = length["mistral"] - 1 if arch.guidance else length["qwen3"]  # the row more has the state of padding

    def told(batch: Batch) -> dict[str, Any]:
        return {"guidance": batch.torch.ones(batch.size, **batch.like) if arch.guidance else None}

    return _baseline("Flux2Transformer2DModel", arch, text, _TARGETS, blocks, given, told)


def flux3(arch: Flux3Arch, length: Lengths) -> TorchBaseline:
    """Returns the counterpart of a FLUX.3, whose rows and columns are numbered by halves, without control images."""
    blocks = "Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"
    given = {"cond_in_channels": arch.control_channels}
    return _baseline("Flux3Transformer2DModel", arch, length["qwen3"], _TARGETS_3, blocks, given, lambda _: {}, 0.5)


def _baseline(
    network: str,
    arch: Flux2Arch | Flux3Arch,
    text: int,
    targets: str,
    blocks: tuple[str, ...],
    more: dict[str, Any],
    settings: Callable[[Batch], dict[str, Any]],
    scale: float = 1.0,
) -> TorchBaseline:
    """Returns what both have alike.

    Args:
        network: diffusers' class.
        arch: the sizes.
        text: tokens of the text.
        targets: the layers that PEFT adapts.
        blocks: the classes that are compiled.
        more: arguments of the class besides its sizes.
        settings: arguments of a call besides tokens and positions.
        scale: by which rows and columns are multiplied.

    Returns:
        The counterpart.
    """
    arguments = more | {
        "in_channels": arch.channels,
        **sizes_of(arch),
        "num_single_layers": arch.single_depth,
        "joint_attention_dim": arch.context_dim,
        "mlp_ratio": arch.mlp / arch.width,
        "axes_dims_rope": arch.axes,
    }

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        pad = batch.torch.nn.functional.pad
        return batch.tokens(arch.channels), velocity(
            encoder_hidden_states=batch.randn(text, arch.context_dim),
            img_ids=(pad(batch.image_ids(), (0, 1)) * scale).to(**batch.like),
            txt_ids=pad(batch.torch.arange(text)[:, None], (3, 0)).to(**batch.like),
            **settings(batch),
        )

    return TorchBaseline(network, arguments, targets, blocks, flow_step(inputs))


BASELINES: Final = {"flux2": flux2, "flux3": flux3}
