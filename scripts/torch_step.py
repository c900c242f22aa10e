"""The yardstick: one LoRA step of SDXL in PyTorch + diffusers + PEFT, at full size with random weights.

Prints one JSON line. Needs a GPU and the parity extra; run it in the same call as `flame-train bench step --json`:

    python scripts/torch_step.py --batch 1 [--compile]

The practice measured is that of diffusers' example scripts: frozen bf16 UNet, fp32 LoRA parameters under bf16
autocast, cached latents and embeddings, clip 1.0, fused AdamW. A step is noise, timesteps, forward, loss, backward,
clip, update. No gradient checkpointing unless asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig

SDXL = {
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}


def build(rank: int, checkpointing: bool) -> tuple[UNet2DConditionModel, list[torch.nn.Parameter]]:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(**SDXL)
    torch.set_default_dtype(torch.float32)
    unet.requires_grad_(False)
    unet.train()
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = [p for p in unet.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
        if p.abs().max() == 0:  # both factors get real gradients, as in our own benchmark
            p.data.normal_(0.0, 1e-3)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet, trained


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    unet, trained = build(args.rank, args.checkpointing)
    if args.compile:
        for module in unet.modules():
            if type(module).__name__ in ("BasicTransformerBlock", "ResnetBlock2D"):
                module.compile()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    b, side = args.batch, args.resolution // 8
    latents = torch.randn(b, 4, side, side, device="cuda", dtype=torch.bfloat16)
    context = torch.randn(b, 77, 2048, device="cuda", dtype=torch.bfloat16)
    size = args.resolution
    extra = {
        "text_embeds": torch.randn(b, 1280, device="cuda", dtype=torch.bfloat16),
        "time_ids": torch.tensor([[size, size, 0, 0, size, size]] * b, device="cuda", dtype=torch.bfloat16),
    }
    abar = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device="cuda").square().neg().add(1).cumprod(0)

    def step() -> None:
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (b,), device="cuda")
        a = abar[t].view(-1, 1, 1, 1)
        noised = (a.sqrt() * latents + (1 - a).sqrt() * noise).to(torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            out = unet(noised, t, context, added_cond_kwargs=extra, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(out.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.synchronize()
    first = time.monotonic() - begin
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(16):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= 4:
            times.append((time.perf_counter() - start) * 1e3)
    print(
        json.dumps(
            {
                "framework": f"torch {torch.__version__}" + (", compiled blocks" if args.compile else ", eager"),
                "batch": b,
                "checkpointing": args.checkpointing,
                "ms": round(statistics.median(times), 2),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "first_step_s": round(first, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
