"""SDXL at full size on a GPU, ours beside diffusers' with the same random weights: errors, times, memory.

    python scripts/full_size.py

Prints one JSON line a part. Needs a GPU and the parity extra. Truth is diffusers in fp32; the baseline for bf16 is
diffusers in bf16, of whose error ours may be at most twice.
"""

from __future__ import annotations

import json
import time

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

import flame_train.engine as flame
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.models.sdxl.keys_unet import SDXL_LEVELS, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch, vector_conditioning
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.conditioning import encode_prompts
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.tools.bench import randomise
from flame_train.tools.bench.torch_models import unet_arguments

BACKEND = get_backend("cuda")


class HostWeights:
    """A network's weights as the name tables read them: fp32 on the host."""

    def __init__(self, module: flame.nn.Module) -> None:
        self.arrays = {name: t.numpy().astype(np.float32) for name, t in module.weights()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def twin_of(module: flame.nn.Module, twin: torch.nn.Module, table) -> torch.nn.Module:
    """`twin` with `module`'s weights, fp32, on the GPU."""
    weights = HostWeights(module)
    sources = table.inverse.pull(weights.arrays).sources
    values = {n: torch.from_numpy(np.array(s.read(weights), order="C")) for n, s in sources.items()}
    twin.load_state_dict(values, strict=True)
    return twin.float().cuda().eval().requires_grad_(False)


def error(found: np.ndarray, truth: torch.Tensor) -> float:
    t = truth.detach().double().cpu().numpy()
    return float(np.linalg.norm(found.astype(np.float64) - t) / np.linalg.norm(t))


def timed(fn):
    BACKEND.synchronize()
    begin = time.perf_counter()
    result = fn()
    BACKEND.synchronize()
    return result, (time.perf_counter() - begin) * 1e3


def report(part: str, **figures: float) -> None:
    memory = BACKEND.memory()
    rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
    print(json.dumps({"part": part, **rounded, "peak_gib": round(memory.peak / 2**30, 2)}), flush=True)
    BACKEND.reset_peak()


def unet() -> None:
    ours = UNet(UNetArch.sdxl())
    randomise(ours, as_dtype("bf16"), BACKEND)
    theirs = twin_of(ours, UNet2DConditionModel(**unet_arguments(UNetArch.sdxl())), unet_from_diffusers(SDXL_LEVELS))
    rng = np.random.default_rng(0)
    x, context = rng.standard_normal((1, 128, 128, 4)), rng.standard_normal((1, 77, 2048))
    pooled, t = rng.standard_normal((1, 1280)), np.array([500])
    ids = np.array([[1024, 1024, 0, 0, 1024, 1024]], np.int32)

    def torch_out(twin: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        def to(a: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(a).to(torch.bfloat16).to(dtype).cuda()

        extra = {"text_embeds": to(pooled), "time_ids": torch.from_numpy(ids).cuda().to(dtype)}
        image = to(x).permute(0, 3, 1, 2)
        out = twin.to(dtype)(image, torch.from_numpy(t).cuda(), to(context), added_cond_kwargs=extra)
        return out.sample.permute(0, 2, 3, 1)

    truth = torch_out(theirs, torch.float32)
    yard = error(torch_out(theirs, torch.bfloat16).float().cpu().numpy(), truth)
    del theirs
    torch.cuda.empty_cache()

    def forward() -> flame.Tensor:
        to = [flame.tensor(a, "bf16", "cuda") for a in (x, context, pooled)]
        with flame.no_grad():
            vector = vector_conditioning(to[2], flame.tensor(ids, device="cuda"))
            return ours(to[0], flame.tensor(t, device="cuda"), to[1], vector)

    _, cold = timed(forward)
    out, warm = timed(forward)
    report("unet bf16", error=error(out.float().numpy(), truth), torch_bf16_error=yard, first_ms=cold, ms=warm)


def vae() -> None:
    ours = Vae(VaeArch.sdxl())
    randomise(ours, as_dtype("fp32"), BACKEND)
    config = {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 4,
    }
    theirs = twin_of(ours, AutoencoderKL(**config), vae_from_diffusers(4))
    pixels = np.random.default_rng(1).uniform(-1, 1, (1, 1024, 1024, 3)).astype(np.float32)
    truth = theirs.double().encode(torch.from_numpy(pixels).double().cuda().permute(0, 3, 1, 2)).latent_dist.mean
    z = truth.permute(0, 2, 3, 1).float().cpu().numpy()
    decoded = theirs.float().decode(torch.from_numpy(z).cuda().permute(0, 3, 1, 2)).sample.permute(0, 2, 3, 1)
    yard = error(
        theirs.encode(torch.from_numpy(pixels).cuda().permute(0, 3, 1, 2)).latent_dist.mean.float().cpu().numpy(), truth
    )
    del theirs
    torch.cuda.empty_cache()
    with flame.no_grad():
        encode = lambda: ours.encode_moments(flame.tensor(pixels, device="cuda"))[0]  # noqa: E731
        decode = lambda: ours.decode(flame.tensor(z * 0.13025, device="cuda"))  # noqa: E731
        timed(encode)
        mean, ms = timed(encode)
        report("vae encode fp32", error=error(mean.numpy().transpose(0, 3, 1, 2), truth), torch_fp32_error=yard, ms=ms)
        timed(decode)
        out, ms = timed(decode)
        report("vae decode fp32", against_torch_fp32=error(out.numpy(), decoded), ms=ms)


def text() -> None:
    encoders = [ClipTextEncoder(ClipArch.clip_l()), ClipTextEncoder(ClipArch.bigg())]
    for e in encoders:
        randomise(e, as_dtype("bf16"), BACKEND)
    from flame_train.text_encoders.clip.tokenizer import ClipTokenizer

    caption = "a photograph of a red fox sitting in fresh snow at sunrise, highly detailed"
    ids = [ClipTokenizer(pad).chunks(caption).ids[None] for pad in (49407, 0)]
    with flame.no_grad():
        timed(lambda: encode_prompts(*encoders, *ids))
        (context, pooled), ms = timed(lambda: encode_prompts(*encoders, *ids))
    finite = float(np.isfinite(context.float().numpy()).all() and np.isfinite(pooled.float().numpy()).all())
    report("text encoders bf16", tokens=context.shape[1], width=context.shape[2], finite=finite, ms=ms)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        for part in (unet, vae, text):
            try:
                part()
            except Exception as e:  # one part's failure must not cost the others' figures
                import traceback

                print(json.dumps({"part": part.__name__, "failed": repr(e)[:2000]}))
                traceback.print_exc(limit=-4)
            torch.cuda.empty_cache()
