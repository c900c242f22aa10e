"""How many blocks "auto" streams, and whether the host has room for what waits there."""

from __future__ import annotations

from dataclasses import replace

from flame_train.engine.backend.host_memory import available
from flame_train.engine.shape_run import H100, Gpu, shape_run
from flame_train.errors import OutOfMemory

from .memory import predicted_memory
from .plan import Plan
from .second import load_second
from .streamed import block_sizes, of_share
from .train import load_denoiser

_LEFT = 1 << 30  # bytes of the GPU for what the prediction leaves out: the CUDA context and its kernels
_STEP = 1 / 16  # by which a share is raised until a run fits


def settled(plan: Plan, gpu: Gpu | None, processes: int = 1) -> Plan:
    """The plan with the blocks that "auto" streams on a GPU: as few as fit its memory. On the CPU it streams none."""
    if plan.config.model.offload != "auto" or gpu is None:
        return plan

    def streaming(share: float) -> Plan:
        names = of_share({n: s for n, s in sizes.items() if n in plan.checked.checkpointed}, share)
        return replace(plan, checked=replace(plan.checked, streamed=frozenset(names)))

    def peak(share: float) -> int:
        return predicted_memory(streaming(share), gpu, processes).training

    sizes, room = block_sizes(plan.model.network), gpu.memory - _LEFT
    resident = peak(0.0)
    if resident <= room:
        return plan
    least = peak(1.0)
    share = min((resident - room) / max(resident - least, 1), 1.0)
    while share < 1.0 and peak(share) > room:
        share = min(share + _STEP, 1.0)
    return streaming(share)


def refuse_small_host(plan: Plan) -> None:
    """Raises OutOfMemory if the host has too little memory for the weights that wait there; nothing is loaded yet."""
    second = plan.checked.sample_model
    if not plan.checked.streamed and second is plan.model:
        return
    with shape_run(H100) as run:
        kept: list[object] = [denoiser := load_denoiser(plan, "cuda")]
        if second is not plan.model:
            kept.append(load_second(second, plan.config, denoiser, "cuda"))
        needed = run.host_bytes
    room = available()
    if needed > room:
        wanted, free = (f"{n / 2**30:.2f} GiB" for n in (needed, room))
        raise OutOfMemory(
            f"{wanted} of weights are to wait in host memory, which has {free} free; lower model.offload, remove "
            "sample.model, or store the weights in 8 bits by model.quantize"
        )
