"""The networks of `models` as diffusers has them, and what diffusers' training scripts do with them."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.torch_baseline import (
    Batch,
    Lengths,
    Loss,
    Predict,
    Prepare,
    TorchBaseline,
    flow_step,
    sizes_of,
    velocity,
)
from flame_train.errors import ConfigError
from flame_train.models.anima.transformer import AnimaArch
from flame_train.models.chroma.transformer import ChromaArch
from flame_train.models.flux.transformer import FluxArch
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.sd3.mmdit import MMDiTArch
from flame_train.models.sdxl.unet import UNetArch
from flame_train.models.zimage.transformer import ZImageArch
from flame_train.networks.rope import image_axes
from flame_train.tools.bench.models import SIZE_CONDITIONING

_UNET_TEXT = 77  # positions of the text
_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
_JOINT = [*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
_FLUX = (
    rf".*\.attn\.({'|'.join(_JOINT)})|.*\.(ff|ff_context)\.net\.(0\.proj|2)"
    r"|single_transformer_blocks\.\d+\.(proj_mlp|proj_out)"
)
_ZIMAGE = rf"layers\.\d+\.(attention\.({'|'.join(_ATTENTION)})|feed_forward\.w[123])"
_ANIMA = rf"transformer_blocks\.\d+\.(attn[12]\.({'|'.join(_ATTENTION)})|ff\.net\.(0\.proj|2))"
_KREA2 = rf"transformer_blocks\.\d+\.(attn\.({'|'.join(_ATTENTION)}|to_gate)|ff\.(gate|up|down))"


def _unet_baseline(arch: UNetArch, length: Lengths) -> TorchBaseline:
    blocks = "BasicTransformerBlock", "ResnetBlock2D"
    made = unet_arguments(arch)
    return TorchBaseline("UNet2DConditionModel", made, _ATTENTION, blocks, _unet(arch), channels_last=True)


def _sd3_baseline(arch: MMDiTArch, length: Lengths) -> TorchBaseline:
    targets = [f"attn.{n}" for n in _JOINT] + [f"attn2.{n}" for n in _ATTENTION]
    loss = _sd3(arch, length["clip_l"] + length["t5"])
    return TorchBaseline("SD3Transformer2DModel", _mmdit_arguments(arch), targets, ("JointTransformerBlock",), loss)


def _zimage_baseline(arch: ZImageArch, length: Lengths) -> TorchBaseline:
    loss, blocks = _zimage(arch, length["qwen3"]), ("ZImageTransformerBlock",)
    return TorchBaseline("ZImageTransformer2DModel", _zimage_arguments(arch), _ZIMAGE, blocks, loss)


def _chroma_baseline(arch: ChromaArch, length: Lengths) -> TorchBaseline:
    loss, blocks = _chroma(arch, length["t5"]), ("ChromaTransformerBlock", "ChromaSingleTransformerBlock")
    arguments = _chroma_arguments(arch)
    return TorchBaseline("ChromaTransformer2DModel", arguments, _FLUX, blocks, loss, cudnn_attention=False)


def _anima_baseline(arch: AnimaArch, length: Lengths) -> TorchBaseline:
    loss, blocks = _anima(arch, length["anima"]), ("CosmosTransformerBlock",)
    return TorchBaseline("CosmosTransformer3DModel", _anima_arguments(arch), _ANIMA, blocks, loss)


def _krea2_baseline(arch: Krea2Arch, length: Lengths) -> TorchBaseline:
    loss, blocks = _krea2(arch, length["qwen3"]), ("Krea2TransformerBlock",)
    return TorchBaseline("Krea2Transformer2DModel", _krea2_arguments(arch), _KREA2, blocks, loss)


def _flux_baseline(arch: FluxArch, length: Lengths) -> TorchBaseline:
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    made, loss = _flux_arguments(arch), _flux(arch, length["t5"])
    # cuDNN's backward pass as PyTorch 2.11 calls it reads where it must not at 4608 tokens of 24 heads of 128
    return TorchBaseline("FluxTransformer2DModel", made, _FLUX, blocks, loss, cudnn_attention=False)


BASELINES: Final = {
    "sdxl": _unet_baseline,
    "sd15": _unet_baseline,
    "sd3": _sd3_baseline,
    "flux": _flux_baseline,
    "zimage": _zimage_baseline,
    "chroma": _chroma_baseline,
    "krea2": _krea2_baseline,
    "anima": _anima_baseline,
}


# ---- SDXL and Stable Diffusion --------------------------------------------------------------------------------------


def unet_arguments(arch: UNetArch) -> dict[str, Any]:
    """Returns the arguments of diffusers' UNet2DConditionModel for the same network."""
    widths = [arch.model_channels * m for m in arch.channel_mult]
    depths = arch.transformer_depth
    down = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    vector = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": arch.adm_in_channels,
    }
    return {
        **(vector if arch.adm_in_channels else {}),
        "in_channels": arch.in_channels,
        "out_channels": arch.out_channels,
        "attention_head_dim": [arch.heads or width // arch.head_dim for width in widths],
        "block_out_channels": widths,
        "cross_attention_dim": arch.context_dim,
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "layers_per_block": arch.num_res_blocks,
        "norm_num_groups": arch.groups,
        "norm_eps": arch.eps,
        "transformer_layers_per_block": [max(depth, 1) for depth in depths],
        "use_linear_projection": arch.linear_projections,
    }


def _unet(arch: UNetArch) -> Prepare:
    def prepare(torch: Any, size: int, resolution: int, like: dict[str, Any]) -> Loss:
        side = resolution // 8
        latents = torch.randn(size, arch.in_channels, side, side, **like).to(memory_format=torch.channels_last)
        context = torch.randn(size, _UNET_TEXT, arch.context_dim, **like)
        extra = {}
        if arch.adm_in_channels:
            extra["text_embeds"] = torch.randn(size, arch.adm_in_channels - SIZE_CONDITIONING, **like)
            extra["time_ids"] = torch.tensor([[resolution, resolution, 0, 0, resolution, resolution]] * size, **like)
        abar = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device=like["device"]).square().neg().add(1).cumprod(0)

        def loss(torch: Any, unet: Any) -> Any:
            noise = torch.randn_like(latents)
            t = torch.randint(0, 1000, (size,), device=like["device"])
            a = abar[t].view(-1, 1, 1, 1)
            noised = (a.sqrt() * latents + (1 - a).sqrt() * noise).to(like["dtype"])
            out = unet(noised, t, context, added_cond_kwargs=extra or None, return_dict=False)[0]
            return torch.nn.functional.mse_loss(out.float(), noise.float())

        return loss

    return prepare


# ---- SD3 and Flux ---------------------------------------------------------------------------------------------------


def _mmdit_arguments(arch: MMDiTArch) -> dict[str, Any]:
    return {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": arch.channels,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "joint_attention_dim": arch.context_dim,
        "caption_projection_dim": arch.width,
        "pooled_projection_dim": arch.pooled_dim,
        "pos_embed_max_size": arch.positions,
        "dual_attention_layers": arch.dual,
        "qk_norm": "rms_norm" if arch.qk_norm else None,
    }


def _sd3(arch: MMDiTArch, text: int) -> Prepare:
    def inputs(batch: Batch) -> tuple[Any, Predict]:
        latents = batch.randn(arch.channels, batch.resolution // 8, batch.resolution // 8)
        predict = velocity(
            encoder_hidden_states=batch.randn(text, arch.context_dim),
            pooled_projections=batch.randn(arch.pooled_dim),
        )
        return latents, lambda transformer, x, t: predict(transformer, x, t * 1000)

    return flow_step(inputs)


def _flux_arguments(arch: FluxArch) -> dict[str, Any]:
    return {
        "in_channels": 4 * arch.channels,
        **sizes_of(arch),
        "num_single_layers": arch.single_depth,
        "joint_attention_dim": arch.context_dim,
        "pooled_projection_dim": arch.pooled_dim,
        "guidance_embeds": arch.guidance,
        "axes_dims_rope": arch.axes,
    }


def _flux(arch: FluxArch, text: int) -> Prepare:
    def inputs(batch: Batch) -> tuple[Any, Predict]:
        return batch.tokens(4 * arch.channels), velocity(
            encoder_hidden_states=batch.randn(text, arch.context_dim),
            pooled_projections=batch.randn(arch.pooled_dim),
            img_ids=batch.image_ids().to(**batch.like),
            txt_ids=batch.torch.zeros(text, 3, **batch.like),
            guidance=batch.torch.ones(batch.size, **batch.like) if arch.guidance else None,
        )

    return flow_step(inputs)


def _chroma_arguments(arch: ChromaArch) -> dict[str, Any]:
    return {
        "in_channels": 4 * arch.channels,
        **sizes_of(arch),
        "num_single_layers": arch.single_depth,
        "joint_attention_dim": arch.context_dim,
        "axes_dims_rope": image_axes(arch.head_dim),
        "approximator_hidden_dim": arch.hidden,
        "approximator_layers": arch.layers,
    }


def _chroma(arch: ChromaArch, text: int) -> Prepare:
    """Captions are as long as they may be, so the mask lets all tokens be seen; it is given, as with any caption."""

    def inputs(batch: Batch) -> tuple[Any, Predict]:
        return batch.tokens(4 * arch.channels), velocity(
            encoder_hidden_states=batch.randn(text, arch.context_dim),
            img_ids=batch.image_ids().to(**batch.like),
            txt_ids=batch.torch.zeros(text, 3, **batch.like),
            attention_mask=batch.seen(text + batch.side**2),
        )

    return flow_step(inputs)


# ---- Anima ----------------------------------------------------------------------------------------------------------


def _anima_arguments(arch: AnimaArch) -> dict[str, Any]:
    """Returns the mask of padding is a channel of the latents here: diffusers makes it smaller by torchvision."""
    return {
        "in_channels": arch.channels + 1,
        "out_channels": arch.channels,
        **sizes_of(arch),
        "mlp_ratio": arch.hidden / arch.width,
        "text_embed_dim": arch.context_dim,
        "adaln_lora_dim": arch.rank,
        "rope_scale": arch.stretch,
        "concat_padding_mask": False,
        "extra_pos_embed_type": None,
    }


def _anima(arch: AnimaArch, text: int) -> Prepare:
    def inputs(batch: Batch) -> tuple[Any, Predict]:
        side = batch.resolution // 8
        latents = batch.randn(arch.channels, 1, side, side)
        context = batch.randn(text, arch.context_dim)

        def predict(transformer: Any, x: Any, t: Any) -> Any:
            padded = batch.torch.nn.functional.pad(x, (0, 0) * 3 + (0, 1))
            return transformer(padded, t, context, return_dict=False)[0]

        return latents, predict

    return flow_step(inputs)


# ---- Z-Image --------------------------------------------------------------------------------------------------------


def _zimage_arguments(arch: ZImageArch) -> dict[str, Any]:
    """Raises ConfigError for sizes that diffusers' class cannot have: three of them follow from the width there."""
    if (arch.hidden, arch.time_dim, arch.time_hidden) != (int(arch.width / 3 * 8), min(arch.width, 256), 1024):
        raise ConfigError("bench: diffusers' Z-Image has no such sizes; use --model zimage, or leave --against out")
    return {
        "in_channels": arch.channels,
        "dim": arch.width,
        "n_layers": arch.depth,
        "n_refiner_layers": arch.refiners,
        "n_heads": arch.width // arch.head_dim,
        "n_kv_heads": arch.width // arch.head_dim,
        "cap_feat_dim": arch.context_dim,
        "rope_theta": arch.theta,
        "axes_dims": list(arch.axes),
        "axes_lens": [1536, 512, 512],
    }


def _zimage(arch: ZImageArch, text: int) -> Prepare:
    def inputs(batch: Batch) -> tuple[Any, Predict]:
        side = batch.resolution // 8
        latents = batch.randn(arch.channels, side, side)
        captions = list(batch.randn(text, arch.context_dim).unbind(0))

        def predict(transformer: Any, x: Any, t: Any) -> Any:
            made = transformer(list(x.unsqueeze(2).unbind(0)), 1 - t, captions, return_dict=False)[0]
            return -batch.torch.stack(made).squeeze(2)

        return latents, predict

    return flow_step(inputs)


def _krea2_arguments(arch: Krea2Arch) -> dict[str, Any]:
    return {
        "in_channels": 4 * arch.channels,
        "num_layers": arch.depth,
        "attention_head_dim": arch.width // arch.heads,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "intermediate_size": arch.hidden,
        "timestep_embed_dim": arch.frequencies,
        "text_hidden_dim": arch.text_dim,
        "num_text_layers": arch.text_layers,
        "text_num_attention_heads": arch.text_heads,
        "text_num_key_value_heads": arch.text_kv_heads,
        "text_intermediate_size": arch.text_hidden,
        "num_layerwise_text_blocks": arch.layerwise,
        "num_refiner_text_blocks": arch.refiners,
        "axes_dims_rope": arch.axes,
    }


def _krea2(arch: Krea2Arch, text: int) -> Prepare:
    def inputs(batch: Batch) -> tuple[Any, Predict]:
        return batch.tokens(4 * arch.channels), velocity(
            encoder_hidden_states=batch.randn(text, arch.text_layers, arch.text_dim),
            position_ids=batch.torch.nn.functional.pad(batch.image_ids(), (0, 0, text, 0)).to(batch.like["device"]),
            encoder_attention_mask=batch.seen(text),
        )

    return flow_step(inputs)
