"""The arithmetic of an op, run on shapes, with which its time is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flame_train.engine import Tensor, grad, no_grad
from flame_train.engine.dtype import DType, is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from flame_train.engine.shape_run import shape_run


def op_flops(op: Op, s: Sample, dtype: DType, wanted: Sequence[str]) -> tuple[int, int]:
    """Floating-point operations of an op's products, forward and backward to the arguments `wanted`; 0 without any."""
    with shape_run() as run:
        bound = materialise(op, s, generator(op.name, 0), dtype, "cuda")
        with no_grad():
            forward = run.multiplied(lambda: op(**bound))
        leaves = [t.requires_grad_() for n, _, t in tensor_arguments(op, bound) if n in wanted and is_float(t.dtype)]
        out = op(**bound)
        backward: Mapping[str, int] = {}
        if isinstance(out, Tensor) and out.requires_grad:
            backward = run.multiplied(lambda: grad([out], leaves, [Tensor(out.data.copy())]))
        return sum(forward.values()), sum(backward.values())
