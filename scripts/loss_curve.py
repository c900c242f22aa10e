"""The loss of a LoRA run here and in PyTorch, step by step: same weights, images, noise, timesteps and factors.

    python scripts/loss_curve.py [--device cuda] [--precision bf16] [--quantize fp8] [--steps 200] [--plot curve.png]

The network is the small SDXL of the package; PyTorch's is diffusers' UNet with PEFT, as its training scripts use them:
frozen weights in low precision, fp32 factors under autocast. Prints the mean of both losses, and how far they are apart
relative to PyTorch's, a step and a mean of ten steps. Needs the parity extra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import torch
from PIL import Image, ImageDraw

from flame_train.adapters.attach import Attached, attach
from flame_train.adapters.targets import resolve
from flame_train.config.schema import Config, DataSection, LoraSection
from flame_train.config.updates import OptimizerSection, ScheduleSection, TrainSection
from flame_train.engine import Tensor, capture
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng
from flame_train.models.common.model import Model
from flame_train.models.common.small import SMALL_SDXL
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.models.sdxl.keys_unet import UNetLevels, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet
from flame_train.networks.vae.vae import VaeArch
from flame_train.run.check.check import storage_of
from flame_train.run.train.train import make_state
from flame_train.tools.bench.torch_models import unet_arguments
from flame_train.training.batch import Batch, HostBatch
from flame_train.training.step import POSTERIOR, State, micro, update

BATCH, SIDE, IMAGES, RATE, RANK, SEED = 4, 16, 12, 1e-3, 8, 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Host = np.ndarray[Any, Any]


def images(model: Model) -> dict[str, Host]:
    """Latent moments and conditioning of a few made-up images: smooth, so that there is something to learn."""
    rng, channels = np.random.default_rng(0), model.vae.network.arch.latent_channels
    coarse = rng.standard_normal((IMAGES, 2, 2, channels)).astype(np.float32)
    captions = {name: rng.standard_normal((IMAGES, *shape)) for name, shape in model.caption_shapes().items()}
    return {
        "mean": 6.0 * coarse.repeat(SIDE // 2, axis=1).repeat(SIDE // 2, axis=2),
        "logvar": np.full((IMAGES, SIDE, SIDE, channels), -8.0, np.float32),
        **{name: array.astype(np.float32) for name, array in captions.items()},
        "time_ids": np.tile(np.array([128, 128, 0, 0, 128, 128], np.int32), (IMAGES, 1)),
    }


def batch(data: dict[str, Host], step: int) -> HostBatch:
    chosen = (np.arange(BATCH) + step * BATCH) % IMAGES
    return HostBatch({n: a[chosen] for n, a in data.items()}, step, np.arange(BATCH), tuple(map(str, chosen)))


def settings(precision: Any, steps: int) -> Config:
    return Config(
        train=TrainSection(precision=precision, steps=steps, seed=SEED),
        lora=LoraSection(rank=RANK, alpha=float(RANK)),
        data=DataSection(batch_size=BATCH),
        optimizer=OptimizerSection(lr=RATE),
        schedule=ScheduleSection(name="constant"),
    )


def ours(state: State, data: dict[str, Host], steps: int, device: str) -> list[float]:
    """Our losses; on a GPU of a captured step."""
    backend = get_backend(device)
    place = Batch(batch(data, 0), backend, state.dtype)

    def once() -> None:
        micro(state, place)
        update(state)

    run, losses = capture(once, device), []
    for step in range(steps):
        place.fill(batch(data, step))
        run()
        losses.append(float(backend.to_host(state.figures)[0]))
    return losses


def twin_of(unet: UNet, attached: Attached, device: str) -> tuple[Any, list[Any]]:
    """diffusers' UNet with our weights and PEFT's factors at our values, and what is trained of it."""
    arch = unet.arch
    table = unet_from_diffusers(UNetLevels(arch.num_res_blocks, tuple(bool(d) for d in arch.transformer_depth))).inverse
    arrays = {name: t.float().numpy() for name, t in unet.weights()}
    sources = table.pull(arrays).sources
    twin = diffusers.UNet2DConditionModel(**unet_arguments(arch))
    values = {
        n: torch.from_numpy(np.array(s.apply([arrays[m] for m in s.names]), order="C")) for n, s in sources.items()
    }
    twin.load_state_dict(values, strict=True)
    there = {s.names[0].removesuffix(".weight"): n.removesuffix(".weight") for n, s in sources.items()}
    names = {there[name]: adapter for name, adapter in attached.adapters.items()}
    twin.requires_grad_(False).to(device)
    twin.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[*names]))
    for name, adapter in names.items():
        layer = twin.get_submodule(name)
        for part, factor in ((layer.lora_A, adapter.down), (layer.lora_B, adapter.up)):
            part["default"].weight.data.copy_(torch.from_numpy(factor.numpy()))
    return twin, [p for p in twin.parameters() if p.requires_grad]


def drawn(data: dict[str, Host], step: int, objective: Any) -> tuple[Any, Any, Any, Any]:
    """Latents, noise and timesteps as our step draws them, and the noised latents."""
    host = batch(data, step)
    rng = Rng(np, SEED, np.asarray(step), host.samples)
    shape = host.arrays["mean"].shape[1:]
    spread = np.exp(0.5 * host.arrays["logvar"]) * rng.normal(POSTERIOR, shape)
    latents = (host.arrays["mean"] + spread) * np.float32(VaeArch.sdxl().scaling_factor)
    noise, t = objective.noise(rng, Tensor(latents)).numpy(), objective.timesteps(rng).numpy()
    abar = objective.schedule.alphas_cumprod[t].astype(np.float32)[:, None, None, None]
    return latents, noise, t, np.sqrt(abar) * latents + np.sqrt(1 - abar) * noise


def theirs(
    twin: Any,
    trained: list[Any],
    data: dict[str, Host],
    draws: Callable[[int], Any],
    steps: int,
    precision: str,
    device: str,
) -> list[float]:
    dtype, losses = DTYPES[precision], []
    twin.to(dtype)
    for p in trained:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)

    def image(a: Host, dtype: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(a.transpose(0, 3, 1, 2))).to(device, dtype)

    for step in range(steps):
        _, noise, t, noised = draws(step)
        host = batch(data, step).arrays
        extra = {
            "text_embeds": torch.from_numpy(host["pooled"]).to(device, dtype),
            "time_ids": torch.from_numpy(host["time_ids"]).to(device),
        }
        context = torch.from_numpy(np.concatenate([host["clip_l"], host["clip_g"]], -1)).to(device, dtype)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = twin(image(noised, dtype), torch.from_numpy(t).to(device), context, added_cond_kwargs=extra).sample
        loss = torch.nn.functional.mse_loss(out.float(), image(noise, torch.float32))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def compared(mine: list[float], other: list[float]) -> dict[str, float]:
    a, b = np.array(mine), np.array(other)
    tens = [x[: len(x) // 10 * 10].reshape(-1, 10).mean(1) for x in (a, b)]
    return {
        "mean loss": a.mean(),
        "PyTorch's": b.mean(),
        "first ten": a[:10].mean(),
        "last ten": a[-10:].mean(),
        "difference of the means": abs(a.mean() - b.mean()) / b.mean(),
        "mean difference": float(np.mean(np.abs(a - b) / b)),
        "largest": float(np.max(np.abs(a - b) / b)),
        "mean difference over ten steps": float(np.mean(np.abs(tens[0] - tens[1]) / tens[1])),
    }


def draw(mine: list[float], other: list[float], path: Path) -> None:
    """Both curves over each other, the thin one ours; where it lies in the middle of the wide one, they agree."""
    image = Image.new("RGB", (900, 420), "white")
    canvas, top, last = ImageDraw.Draw(image), max(mine + other), max(len(mine) - 1, 1)
    for quarter in range(5):
        y = 380 - 340 * quarter / 4
        canvas.line((60, y, 880, y), "#dddddd")
        canvas.text((15, y - 6), f"{top * quarter / 4:.3g}", "#222222")
    for step in {0, last // 2, last}:
        canvas.text((56 + 820 * step / last, 388), str(step + 1), "#222222")
    canvas.text((15, 14), "loss", "#222222")
    canvas.text((450, 404), "step", "#222222")
    for losses, colour, width, name, x in ((other, "#f0b090", 7, "PyTorch", 700), (mine, "#1f6fb4", 1, "ours", 800)):
        canvas.line([(60 + 820 * i / last, 380 - 340 * v / top) for i, v in enumerate(losses)], colour, width)
        canvas.line((x, 20, x + 24, 20), colour, width)
        canvas.text((x + 30, 14), name, "#222222")
    image.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="bf16", choices=[*DTYPES])
    parser.add_argument(
        "--quantize", default="off", choices=["off", "fp8", "int8", "nf4"], help="as model.quantize; ours alone"
    )
    parser.add_argument(
        "--arithmetic", default="bf16", choices=["bf16", "fp8", "int8"], help="as model.arithmetic; ours alone"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    config = settings(args.precision, args.steps)
    model = FAMILIES["sdxl"].open(replace(NOTHING_NAMED, base=SMALL_SDXL))
    on = {"device": args.device, "dtype": args.precision}
    denoiser = model.load_denoiser(**on, storage=storage_of(args.quantize, args.arithmetic))
    unet = denoiser.network
    attached = attach(unet, resolve(unet, ("attention",), model.presets), rank=RANK, alpha=float(RANK), seed=SEED)
    objective, host_objective = (model.objective(config.model, config.loss, on) for on in (args.device, "cpu"))
    twin, trained = twin_of(model.load_denoiser(**on).network, attached, args.device)
    data = images(model)
    state = make_state(
        denoiser, attached, objective, config.train, config.optimizer, config.schedule, config.gradient, args.device
    )
    mine = ours(state, data, args.steps, args.device)
    other = theirs(
        twin, trained, data, lambda step: drawn(data, step, host_objective), args.steps, args.precision, args.device
    )
    print(json.dumps({n: float(f"{v:.5g}") for n, v in compared(mine, other).items()}, indent=1))
    if args.plot:
        draw(mine, other, args.plot)


if __name__ == "__main__":
    main()
