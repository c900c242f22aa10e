"""Matrix products of a warpgroup (wgmma) as CUDA functions: no header offers these instructions of capability 9.0."""

from __future__ import annotations

from ...dtype import DType, bfloat16, float16

KIND = {bfloat16: "bf16", float16: "f16"}
"""PTX's names of the elements that warpgroups multiply."""


def warpgroup_product(
    name: str,
    columns: int,
    across: bool,
    dtype: DType,
    held: bool = False,
    overwrite: bool = False,
    turned: bool = False,
) -> str:
    """The text of function `name`: sums (64, columns) = or += a (64, 16) b (16, columns), one wgmma instruction.

    a lies in shared memory as it is or, `turned`, as its transpose, unless it is `held` in registers. The other, b,
    lies there as its transpose or, `across`, as it is. The function's argument `more` says whether to add to the sums;
    a `overwrite` one has none and always overwrites them.

    Args:
        name: the function's.
        columns: of b, a multiple of 8.
        across: whether b lies as it is, not transposed.
        dtype: bf16 or fp16.
        held: whether a is in registers.
        overwrite: whether sums are always overwritten.
        turned: whether a lies transposed.

    Returns:
        The text.
    """
    n, given, kind = columns // 2, 4 if held else 1, KIND[dtype]
    registers = ", ".join(f"%{i}" for i in range(n))
    sums = ", ".join(f'"{"=" if overwrite else "+"}f"(sums[{i}])' for i in range(n))
    left = f"{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}" if held else f"%{n}, %{n + 1}"
    operands = ", ".join(f'"r"(a[{i}])' for i in range(given)) if held else '"l"(a)'
    transposed = f"1, 1, {int(across)}" if held else f"1, 1, {int(turned)}, {int(across)}"
    more = ("", "0", "") if overwrite else (", int more = 1", f"%{n + given + 1}", ', "r"(more)')
    return f"""
__device__ __forceinline__ void {name}(
    float (&sums)[{n}], {"const unsigned*" if held else "unsigned long long"} a, unsigned long long b{more[0]}
) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {more[1]}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
      "{{{registers}}}, {left}, p, {transposed};\\n}}"
      : {sums} : {operands}, "l"(b){more[2]});
}}
"""
