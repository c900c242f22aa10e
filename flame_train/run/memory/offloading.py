"""How many blocks "auto" streams, and whether the host has room for what waits there."""

from __future__ import annotations

from dataclasses import replace

from flame_train.engine.backend.host_memory import available
from flame_train.engine.shape_run import H100, Gpu, shape_run
from flame_train.errors import OutOfMemory
from flame_train.run.check.streaming import block_sizes, of_share
from flame_train.run.plan.plan import Plan
from flame_train.run.train.preview_network import load_second
from flame_train.run.train.train import load_denoiser

from .prediction import PredictedMemory, predicted_memory

_LEFT = 1 << 30  # bytes of the GPU for what the prediction leaves out: the CUDA context and its kernels
_STEP = 1 / 16  # by which a share is raised until a run fits


def resolve_offload(plan: Plan, gpu: Gpu | None, processes: int = 1) -> Plan:
    """The plan with the blocks that "auto" streams on a GPU: as few as fit its memory. On the CPU it streams none."""
    if plan.config.model.offload != "auto" or gpu is None:
        return plan

    def streaming(share: float) -> Plan:
        names = of_share({n: s for n, s in sizes.items() if n in plan.checked.checkpointed}, share)
        return replace(plan, checked=replace(plan.checked, streamed=frozenset(names), streamed_text=text))

    def predicted(share: float) -> PredictedMemory:
        return predicted_memory(streaming(share), gpu, processes)

    sizes, room, text = block_sizes(plan.model.network), gpu.memory - _LEFT, 0.0
    resident = predicted(0.0)
    text = float(resident.encoding > room)
    if resident.training <= room:
        return streaming(0.0)
    share = min((resident.training - room) / max(resident.training - predicted(1.0).training, 1), 1.0)
    while share < 1.0 and predicted(share).training > room:
        share = min(share + _STEP, 1.0)
    return streaming(share)


def refuse_small_host(plan: Plan) -> None:
    """Raises OutOfMemory if the host has too little memory for the weights that wait there; nothing is loaded yet."""
    second, text = plan.checked.sample_model, plan.checked.streamed_text and plan.encoding.text
    if not plan.checked.streamed and not text and second is plan.model:
        return
    with shape_run(H100) as run:
        kept: list[object] = [plan.encoding.encoders("cuda")] if text else []
        encoders = run.host_bytes
        kept.clear()
        kept.append(denoiser := load_denoiser(plan, "cuda"))
        if second is not plan.model:
            kept.append(load_second(second, plan.config, denoiser, "cuda"))
        needed = max(encoders, run.host_bytes)
    room = available()
    if needed > room:
        wanted, free = (f"{n / 2**30:.2f} GiB" for n in (needed, room))
        raise OutOfMemory(
            f"{wanted} of weights are to wait in host memory, which has {free} free; lower model.offload, remove "
            "sample.model, or store the weights in 8 bits by model.quantize"
        )
