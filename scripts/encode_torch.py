"""The baseline of `encode_times.py`: the same networks in PyTorch, eager, on random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention on projections, causal or with a bias, as transformers' CLIP and T5 have it."""

    def __init__(self, width: int, heads: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=bias) for _ in range(3))
        self.o = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Any, mask: Any, scale: float | None) -> Any:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return self.o(out.transpose(1, 2).flatten(2))


class ClipLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, width, True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x), None, None)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Clip(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(49408, width), nn.Embedding(77, width)
        self.layers = nn.ModuleList([ClipLayer(width, heads, hidden) for _ in range(layers)])

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return x


class T5Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(4096, 64, 4096, False)
        self.norm1, self.norm2 = nn.RMSNorm(4096), nn.RMSNorm(4096)
        self.wi_0, self.wi_1 = (nn.Linear(4096, 10240, bias=False) for _ in range(2))
        self.wo = nn.Linear(10240, 4096, bias=False)

    def forward(self, x: Any, bias: Any) -> Any:
        x = x + self.attention(self.norm1(x), bias, 1.0)
        h = self.norm2(x)
        return x + self.wo(F.gelu(self.wi_0(h), approximate="tanh") * self.wi_1(h))


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32128, 4096)
        self.layers = nn.ModuleList([T5Layer() for _ in range(24)])
        self.bias = nn.Parameter(torch.zeros(1, 64, 512, 512))

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


def timed(name: str, run: Callable[[], Any], items: int) -> None:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(8):
        run()
    print(f"{name:<44} {(time.perf_counter() - begin) / 8 / items * 1e3:8.2f} ms", flush=True)


@torch.no_grad()
def main(only: list[str], device: str) -> None:
    """Prints ms an item, the result on the host."""
    if "clip" in only:
        clips = [Clip(768, 12, 12, 3072), Clip(1280, 32, 20, 5120)]
        clips = [clip.to(device, torch.bfloat16) for clip in clips]
        for size in (1, 32):
            ids = torch.randint(0, 40000, (size, 77))
            timed(
                f"PyTorch: both CLIPs, batch {size}, bf16", lambda i=ids: [c(i.to(device)).cpu() for c in clips], size
            )
        del clips
    if "t5" in only:
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            t5 = T5()
            torch.set_default_dtype(torch.float32)
        for size in (1, 8):
            ids = torch.randint(0, 32000, (size, 512))
            timed(f"PyTorch: T5-XXL, batch {size}, 512 tokens, bf16", lambda i=ids: t5(i.to(device)).cpu(), size)
        del t5
        torch.cuda.empty_cache()
    if "vae" in only:
        vae(device)


def vae(device: str) -> None:
    from diffusers import AutoencoderKL

    blocks = 4
    network = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=2,
        latent_channels=4,
    )
    image = torch.rand(1, 3, 1024, 1024) * 2 - 1
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, True),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ):
        torch.backends.cudnn.allow_tf32 = tf32
        network = network.to(device, dtype)
        timed(
            f"PyTorch: an image of 1024 x 1024, {name}",
            lambda d=dtype, n=network: n.encode(image.to(device, d)).latent_dist.parameters.cpu(),
            1,
        )
