"""Whether some or all elements are true: not zero. NaN is true, as in PyTorch."""

from __future__ import annotations

from ....errors import ShapeError
from ...backend.cuda.codegen.kernel_ir import Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bool_, int32, int64
from ...namespace import Namespace
from ...op import Op, primitive, sample
from ...op_samples import booleans, integers, no_such_dim
from ..common.conditions import GENERATED
from ..common.dims import Dims, axes
from ..common.row_kernels import extent, reduce


@primitive(torch="any", accepts_integers=True)
def any(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where at least one element over dim is not zero; False over none"""
    return xp.any(input != 0, axis=axes(dim, input.ndim, "any"), keepdims=keepdim)


@primitive(torch="all", accepts_integers=True)
def all(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where no element over dim is zero; True over none"""
    return xp.all(input != 0, axis=axes(dim, input.ndim, "all"), keepdims=keepdim)


for _op in (any, all):
    _op.non_differentiable("input")
    _op.samples(
        sample(booleans(3, 4)),
        sample(integers(2, 2, 3, 4), 1),
        sample(booleans(2, 3, 4), (0, 2), keepdim=True),
        sample((0, 3), 0),
        sample((3, 2)),
    )
    _op.perf_samples(
        sample(booleans(4, 70, 640)),
        sample(booleans(20_003)),
        sample(booleans(3, 700, 40), 1),
        sample(integers(2, 300, 640), -1, keepdim=True),
    )
    _op.errors(no_such_dim())


def _no_kernel(input: Array, dim: Dims) -> str:
    """Why the reduction kernels cannot take `input` over `dim`; "" if they can."""
    if not input.size or not input.ndim:
        return "no elements, or a single one"
    if input.dtype not in GENERATED | {int32, int64}:
        return f"no kernel for {input.dtype.name}"
    try:
        return "" if extent(input.shape, axes(dim, input.ndim, "truth")) else "the dims are not neighbours"
    except ShapeError:
        return "arguments that are refused"


def _reducing(op: Op, how: str) -> None:
    """Declares the kernel of an op that is the largest, or smallest, of the truth values."""

    @op.cuda("reduction", when=_no_kernel)
    def _(k: Launcher, input: Array, dim: Dims, keepdim: bool) -> Array:
        dims = axes(dim, input.ndim, "truth")
        found = reduce(k, Reduction(how, "input != 0.f ? 1.f : 0.f"), {"input": input}, dims, bool_)
        return found if keepdim else found.reshape([n for i, n in enumerate(found.shape) if i not in dims])


_reducing(any, "max")
_reducing(all, "min")
