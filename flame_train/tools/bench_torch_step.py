"""The yardstick: the same LoRA step in PyTorch + diffusers + PEFT, where they are installed.

The practice measured is that of diffusers' example scripts: frozen UNet in low precision, fp32 LoRA parameters under
autocast, cached latents and embeddings, clip 1.0, fused AdamW. A step is noise, timesteps, forward, loss, backward,
clip, update.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

from flame_train.errors import EnvironmentFault
from flame_train.models.unet_sdxl import UNetArch

_WARM, _TIMED = 4, 12
_FEW = 1, 3  # on a CPU, whose steps take seconds
_NEEDED = ("torch", "diffusers", "peft")


def run(
    arch: UNetArch, resolution: int, batch: int, rank: int, precision: str, checkpointing: bool, device: str,
    compiled: bool,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds a step (median), peak GiB, seconds to the end of the first step.

    `compiled` compiles each transformer and residual block. Raises `EnvironmentFault` naming what is not installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"bench step --against torch: {', '.join(missing)} not installed; leave the option out")
    torch = importlib.import_module("torch")
    begin = time.monotonic()
    unet, trained = _build(torch, arch, rank, precision, checkpointing, device)
    if compiled:
        for module in unet.modules():
            if type(module).__name__ in ("BasicTransformerBlock", "ResnetBlock2D"):
                module.compile()
    step = _step(torch, unet, trained, arch, resolution, batch, device)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    wait()
    first = time.monotonic() - begin
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    warm, timed = (_WARM, _TIMED) if device == "cuda" else _FEW
    for i in range(warm + timed):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if i >= warm:
            times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "framework": f"torch {torch.__version__}" + (", compiled blocks" if compiled else ", eager"),
        "ms": round(statistics.median(times), 3),
        "peak_gib": None if peak is None else round(peak, 2),
        "first_step_s": round(first, 2),
    }


def _build(
    torch: Any, arch: UNetArch, rank: int, precision: str, checkpointing: bool, device: str
) -> tuple[Any, list[Any]]:
    diffusers, peft = importlib.import_module("diffusers"), importlib.import_module("peft")
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(torch, precision))
    try:
        with torch.device(device):
            unet = diffusers.UNet2DConditionModel(**diffusers_config(arch))
    finally:
        torch.set_default_dtype(before)
    unet.requires_grad_(False)
    unet.train()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    trained = [p for p in unet.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
        if p.abs().max() == 0:  # both factors get real gradients, as in our own step
            p.data.normal_(0.0, 1e-3)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet, trained


def diffusers_config(arch: UNetArch) -> dict[str, Any]:
    """The arguments of diffusers' UNet2DConditionModel for the same network."""
    widths = [arch.model_channels * m for m in arch.channel_mult]
    depths = arch.transformer_depth
    down = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    return {
        "in_channels": arch.in_channels,
        "out_channels": arch.out_channels,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "attention_head_dim": [width // arch.head_dim for width in widths],
        "block_out_channels": widths,
        "cross_attention_dim": arch.context_dim,
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "layers_per_block": arch.num_res_blocks,
        "norm_num_groups": arch.groups,
        "projection_class_embeddings_input_dim": arch.adm_in_channels,
        "transformer_layers_per_block": [max(depth, 1) for depth in depths],
        "use_linear_projection": True,
    }


def _step(
    torch: Any, unet: Any, trained: list[Any], arch: UNetArch, resolution: int, batch: int, device: str
) -> Callable[[], None]:
    dtype, side = unet.dtype, resolution // 8
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    like = {"device": device, "dtype": dtype}
    latents = torch.randn(batch, arch.in_channels, side, side, **like)
    context = torch.randn(batch, 77, arch.context_dim, **like)
    extra = {
        "text_embeds": torch.randn(batch, arch.adm_in_channels - 6 * 256, **like),
        "time_ids": torch.tensor([[resolution, resolution, 0, 0, resolution, resolution]] * batch, **like),
    }
    abar = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device=device).square().neg().add(1).cumprod(0)

    def step() -> None:
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (batch,), device=device)
        a = abar[t].view(-1, 1, 1, 1)
        noised = (a.sqrt() * latents + (1 - a).sqrt() * noise).to(dtype)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = unet(noised, t, context, added_cond_kwargs=extra, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(out.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _dtype(torch: Any, precision: str) -> Any:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
