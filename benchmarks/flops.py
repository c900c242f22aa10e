"""A call of an op, run on shapes: its arithmetic, with which its time is compared, and the kernels that it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flame_train.engine import Tensor, grad, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from flame_train.engine.random import Rng
from flame_train.engine.shape_run import H100, Gpu, KernelRequests, shape_run


@dataclass(frozen=True, slots=True)
class Counted:
    """Floating-point operations of an op's products, forward and backward, 0 without any; and its kernels."""

    forward: int
    backward: int
    kernels: KernelRequests


def op_flops(op: Op, s: Sample, dtype: DType, wanted: Sequence[str]) -> tuple[int, int]:
    """Floating-point operations of an op's products, forward and backward to the arguments `wanted`; 0 without any."""
    found = counted(op, materialise(op, s, generator(op.name, 0), dtype), wanted)
    return found.forward, found.backward


def counted(op: Op, host: Mapping[str, Any], wanted: Sequence[str], gpu: Gpu = H100) -> Counted:
    """Returns the same of arguments on the host, with the kernels that `gpu` would run."""
    with shape_run(gpu) as run:
        bound = on_device(host, "cuda")
        with no_grad():
            forward = run.multiplied(lambda: op(**bound))
        leaves = [t.requires_grad_() for n, _, t in tensor_arguments(op, bound) if n in wanted and is_float(t.dtype)]
        outs = differentiable(op(**bound))
        backward: Mapping[str, int] = {}
        if outs:
            ones = [Tensor(o.data.copy()) for o in outs]
            backward = run.multiplied(lambda: grad(outs, leaves, ones, allow_unused=True))
        return Counted(sum(forward.values()), sum(backward.values()), run.kernel_requests)


def differentiable(result: Any) -> list[Tensor]:
    """Returns those of an op's results that have a gradient."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [t for t in found if isinstance(t, Tensor) and t.requires_grad]


def on_device(host: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Arguments on the host, copied to a device; random numbers are drawn there too."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(v) for v in value]
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, Rng):
            backend = get_backend(device)
            return replace(value, xp=backend.xp, samples=backend.to_device(value.samples))
        return value

    return {name: moved(value) for name, value in host.items()}
