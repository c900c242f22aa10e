"""The baseline: the same LoRA step in PyTorch + diffusers + PEFT, where they are installed.

The baseline follows diffusers' example scripts: a frozen network in low precision, fp32 LoRA parameters under
autocast, cached latents and embeddings. It clips at 1.0 and uses fused AdamW. A step is noise, timesteps, forward,
loss, backward, clip, update. It adds free speed-ups: channels last for convolutions, cuDNN's search for the fastest
of them, TF32 for the remaining fp32, and steps queued without waiting.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import logging
import socket
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

from benchmarks.torch_baseline import Loss, TorchBaseline
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.errors import EnvironmentFault

_LOG = logging.getLogger(__name__)
_WARM, _TIMED = 4, 12
_FEW = 1, 3  # on a CPU, whose steps take seconds
_NEEDED = ("torch", "diffusers", "peft")
_RECOMPILE_LIMIT = 64  # UNet blocks of one class have a dozen shapes and share one code object; the default is 8


def check_installed() -> None:
    """Raises `EnvironmentFault` naming missing libraries."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"bench step --against torch: {', '.join(missing)} not installed; leave the option out")


def run(
    model: TorchBaseline,
    resolution: int,
    batch: int,
    rank: int,
    precision: str,
    checkpointing: bool,
    device: str,
    compiled: bool,
    group: ProcessGroup = ALONE,
) -> dict[str, Any]:
    """Times a training step of PyTorch, diffusers and PEFT.

    Args:
        model: the model to train.
        resolution: side of the square image, in pixels.
        batch: images in a step.
        rank: rank of the LoRA.
        precision: "fp32", "bf16" or "fp16".
        checkpointing: whether activations are recomputed.
        device: "cuda" or "cpu".
        compiled: whether each block is compiled by itself.
        group: the processes that take the step together, each with a batch of its own.

    Returns:
        The median milliseconds of a step, peak GiB, and the seconds until the first step ended. `left_eager` counts the
        calls that PyTorch's compiler gave up on; each is logged too.

    Raises:
        EnvironmentFault: a library is not installed; the message names it.
    """
    check_installed()
    torch = importlib.import_module("torch")
    dtype = _dtype(torch, precision)
    _prepare(torch, model, precision, device)
    begin = time.monotonic()
    network, trained = build(torch, model, rank, precision, checkpointing, device)
    if compiled:
        compile_blocks(torch, network, model.blocks)
    if group.world > 1:
        network = in_parallel(torch, network, device, group)
    given_up = calls_given_up(torch)
    loss = model.loss(torch, batch, resolution, {"device": device, "dtype": dtype})
    step = _step(torch, network, trained, loss, dtype, device)
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    first = time.monotonic() - begin
    ms, peak = _on_gpu(torch, step) if device != "cpu" else (_on_cpu(step), None)
    if group.world > 1:
        torch.distributed.destroy_process_group()
    how = ", DistributedDataParallel" if group.world > 1 else ""
    result = {
        "framework": f"torch {torch.__version__}" + (", compiled blocks" if compiled else ", eager") + how,
        "ms": round(ms, 3),
        "peak_gib": peak,
        "first_step_s": round(first, 2),
        "trainable_parameters": sum(p.numel() for p in trained),
    }
    return result | ({"left_eager": _told(calls_given_up(torch) - given_up)} if compiled else {})


def _prepare(torch: Any, model: TorchBaseline, precision: str, device: str) -> None:
    """Frees the memory of an earlier measurement, and sets PyTorch up for its best speed."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cpu":
        return
    torch.cuda.set_device(_number(device))
    torch.cuda.empty_cache()
    torch.backends.cuda.enable_cudnn_sdp(model.cudnn_attention)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def compile_blocks(
    torch: Any, network: Any, blocks: Collection[str], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compiles each module whose class is named in `blocks` by itself, for each of its shapes."""
    config = torch._dynamo.config
    setattr(config, "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit", _RECOMPILE_LIMIT)
    for module in network.modules():
        if type(module).__name__ in blocks:
            module.compile(dynamic=False, backend=backend)


def in_parallel(torch: Any, network: Any, device: str, group: ProcessGroup) -> Any:
    """Returns the network in DistributedDataParallel. The processes meet at a free port of the first one."""
    with socket.socket() as free:
        free.bind(("", 0))
        mine = f"{socket.gethostname()}:{free.getsockname()[1]}"
    places = group.all_gather(mine)
    hosts = {place.rpartition(":")[0] for place in places}
    host, _, port = places[0].rpartition(":")
    # Given a store of its own: by an address alone, processes that torchrun started would look for torchrun's there.
    place = host if len(hosts) > 1 else "127.0.0.1"
    store = torch.distributed.TCPStore(place, int(port), group.world, is_master=group.rank == 0)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=store, rank=group.rank, world_size=group.world
    )
    return torch.nn.parallel.DistributedDataParallel(
        network,
        device_ids=None if device == "cpu" else [_number(device)],
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def _number(device: str) -> int:
    """Of a GPU: 0 for "cuda", 1 for "cuda:1"."""
    return int(device.partition(":")[2] or 0)


def calls_given_up(torch: Any) -> int:
    """Returns the number of calls that PyTorch's compiler gave up on, since the program began.

    It asks no more once a limit is hit, so any number above 0 says that something runs uncompiled.
    """
    frames = torch._dynamo.utils.counters["frames"]
    return int(frames["total"] - frames["ok"])


def _told(given_up: int) -> int:
    if given_up:
        _LOG.warning("PyTorch's compiler left %d calls uncompiled: this is not PyTorch at its best", given_up)
    return given_up


def _on_gpu(torch: Any, step: Callable[[], None]) -> tuple[float, float]:
    """(median milliseconds between the ends of steps, peak GiB). The host is not held up: it may queue ahead."""
    for _ in range(_WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return ms, round(torch.cuda.max_memory_allocated() / 2**30, 2)


def _on_cpu(step: Callable[[], None]) -> float:
    """Median milliseconds a step."""
    warm, timed = _FEW
    times = []
    for _ in range(warm + timed):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[warm:])


def build(
    torch: Any, model: TorchBaseline, rank: int, precision: str, checkpointing: bool, device: str
) -> tuple[Any, list[Any]]:
    """Builds the network with random weights and adds the LoRA.

    Args:
        torch: the module.
        model: the model to train.
        rank: rank of the LoRA.
        precision: "fp32", "bf16" or "fp16".
        checkpointing: whether activations are recomputed.
        device: "cuda" or "cpu".

    Returns:
        The network, and its trainable parameters.
    """
    peft = importlib.import_module("peft")
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(torch, precision))
    try:
        with torch.device("meta"):  # the modules' own initialisation of the largest takes minutes
            network = model.build()
    finally:
        torch.set_default_dtype(before)
    network.to_empty(device=device)
    if model.tables:
        model.tables(network)
    with torch.no_grad():
        for t in itertools.chain(network.parameters(), network.buffers()):
            t.normal_(0.0, 0.02) if t.ndim > 1 else t.fill_(1.0)
    network.to(_dtype(torch, precision)).requires_grad_(False)
    if model.channels_last:
        network.to(memory_format=torch.channels_last)
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
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device != "cpu")

    def step() -> None:
        with torch.autocast(device.partition(":")[0], dtype, enabled=dtype != torch.float32):
            value = loss(torch, network)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _dtype(torch: Any, precision: str) -> Any:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
