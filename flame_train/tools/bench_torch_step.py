"""The yardstick: the same LoRA step in PyTorch + diffusers + PEFT, where they are installed.

The practice measured is that of diffusers' example scripts: frozen network in low precision, fp32 LoRA parameters under
autocast, cached latents and embeddings, clip 1.0, fused AdamW. A step is noise, timesteps, forward, loss, backward,
clip, update.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from flame_train.errors import EnvironmentFault

from .bench_torch_models import Loss, Yardstick

_WARM, _TIMED = 4, 12
_FEW = 1, 3  # on a CPU, whose steps take seconds
_NEEDED = ("torch", "diffusers", "peft")


def run(
    model: Yardstick, resolution: int, batch: int, rank: int, precision: str, checkpointing: bool, device: str,
    compiled: bool,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds a step (median), peak GiB, seconds to the end of the first step.

    `compiled` compiles each block by itself. Raises `EnvironmentFault` naming what is not installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"bench step --against torch: {', '.join(missing)} not installed; leave the option out")
    torch = importlib.import_module("torch")
    torch.backends.cuda.enable_cudnn_sdp(model.cudnn_attention)
    begin = time.monotonic()
    network, trained = build(torch, model, rank, precision, checkpointing, device)
    if compiled:
        for module in network.modules():
            if type(module).__name__ in model.blocks:
                module.compile()
    loss = model.loss(torch, batch, resolution, {"device": device, "dtype": _dtype(torch, precision)})
    step = _step(torch, network, trained, loss, _dtype(torch, precision), device)

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
        "trainable_parameters": sum(p.numel() for p in trained),
    }


def build(
    torch: Any, model: Yardstick, rank: int, precision: str, checkpointing: bool, device: str
) -> tuple[Any, list[Any]]:
    """The network with random weights on the device, adapted, and the parameters that are trained."""
    peft = importlib.import_module("peft")
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(torch, precision))
    try:
        with torch.device("meta"):  # the modules' own initialisation of the largest takes minutes
            network = model.build()
    finally:
        torch.set_default_dtype(before)
    network.to_empty(device=device)
    with torch.no_grad():
        for t in itertools.chain(network.parameters(), network.buffers()):
            t.normal_(0.0, 0.02) if t.ndim > 1 else t.fill_(1.0)
    network.to(_dtype(torch, precision)).requires_grad_(False)
    network.train()
    network.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=model.targets))
    trained = [p for p in network.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
        if p.abs().max() == 0:  # both factors get real gradients, as in our own step
            p.data.normal_(0.0, 1e-3)
    if checkpointing:
        network.enable_gradient_checkpointing()
    return network, trained


def _step(torch: Any, network: Any, trained: list[Any], loss: Loss, dtype: Any, device: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            value = loss(torch, network)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _dtype(torch: Any, precision: str) -> Any:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
