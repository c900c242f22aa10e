"""The passes over the arena by which a rule updates it on a GPU: generated from its own Python, or a kernel it has.

`Rule.update` is called once with elements that record what is done to them. Each operation is rounded for itself. So
the kernel gives the bits of the reference, which runs the same Python over whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..dtype import Array, bool_, float32, float64, int64, uint8
from ..namespace import Namespace
from .flat_parameters import FlatParameters
from .transform import Rule, State, Step, TermsRule

Elements = Callable[
    [Callable[[Any, dict[str, Any]], Mapping[str, Any]], Mapping[str, str]], tuple[list[str], dict[str, str]]
]
"""Traces a formula over single elements; see `backend/cuda/codegen/scalars.py`."""

_TYPES = {float32: "float", float64: "double", int64: "long long", uint8: "unsigned char", bool_: "bool"}
_THREADS, _SUM_BLOCKS = 256, 1024


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule's own kernel. `text` defines update_by_rule(arena, `tables`, `states`, sums) in CUDA C, for a whole block.

    It stands behind update.cuh and matrices.cuh. Threads and `constants` are constants in capitals. `states` are arrays
    of the rule's state, null where there is none of the name. `sums` names sums over all values: each block writes its
    own, to sums[number * gridDim.x + blockIdx.x].
    """

    text: str
    blocks: int
    threads: int
    tables: Mapping[str, Array]
    states: Mapping[str, np.dtype[Any]]
    constants: Mapping[str, float | int | bool] = field(default_factory=dict)
    sums: tuple[str, ...] = ()


@runtime_checkable
class KernelRule(Protocol):
    """A rule that is not elementwise, and runs by a kernel of its own where there is a GPU."""

    def kernel(self, arena: FlatParameters) -> Kernel:
        """Returns the kernel that does what `update` does, within rounding."""


@dataclass(frozen=True, slots=True)
class KernelPass:
    """One launch: behind the arguments that all passes have stand `args`. `sums` are what its blocks leave, fp64."""

    name: str
    text: str
    blocks: int
    threads: int
    args: tuple[Any, ...]
    sums: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Element:
    """The arena as a rule sees it element by element."""

    values: Any
    lr_scale: Any
    decay_scale: Any


def fuses(rule: Any, state: State) -> bool:
    """Tells whether a rule's update can be passes of these."""
    if isinstance(rule, KernelRule):
        return True
    return bool(getattr(rule, "elementwise", False)) and all(a.dtype == float32 for a in state.values() if a.ndim)


def passes_of(
    rule: Rule, arena: FlatParameters, state: State, numbers: Sequence[str], elements: Elements
) -> tuple[KernelPass, ...]:
    """Returns the passes of a rule, in order.

    Args:
        numbers: names of its single numbers, which kernels read from `now`.
        elements: traces a formula over single elements.
    """
    if isinstance(rule, KernelRule):
        return (_kernel_pass(rule.name, rule.kernel(arena), arena, state),)
    made = _Generated(rule, arena, state, numbers, elements)
    return (*([made.terms(rule)] if isinstance(rule, TermsRule) else []), made.update())


def _kernel_pass(name: str, kernel: Kernel, arena: FlatParameters, state: State) -> KernelPass:
    """Returns a rule's own kernel, with its signature and its constants written before it."""
    types = {n: _TYPES[a.dtype] for n, a in kernel.tables.items()} | {n: _TYPES[d] for n, d in kernel.states.items()}
    sums = _sums(arena, kernel.sums, kernel.blocks)
    text = _BY_KERNEL.format(
        name=name,
        threads=kernel.threads,
        constants="".join(_constant(n, v) for n, v in kernel.constants.items()),
        text=kernel.text,
        parameters="".join(f", {kind}* p_{n}" for n, kind in types.items()),
        arguments="".join(f", p_{n}" for n in types),
    )
    none = np.intp(0)
    args = (*kernel.tables.values(), *(state.get(n, none) for n in kernel.states), sums if kernel.sums else none)
    return KernelPass(name, text, kernel.blocks, kernel.threads, args, dict(zip(kernel.sums, sums, strict=True)))


def _constant(name: str, value: float | bool) -> str:
    kind = "float" if isinstance(value, float) else "bool" if isinstance(value, bool) else "int"
    text = f"{float(np.float32(value))!r}f" if isinstance(value, float) else str(value).lower()
    return f"constexpr {kind} {name} = {text};\n"


def _sums(arena: FlatParameters, names: Sequence[str], blocks: int) -> Array:
    return arena.backend.xp.empty((len(names), blocks), np.float64)


class _Generated:
    """Kernels of an elementwise rule."""

    def __init__(
        self, rule: Rule, arena: FlatParameters, state: State, numbers: Sequence[str], elements: Elements
    ) -> None:
        self._rule, self._arena, self._state, self._numbers, self._elements = rule, arena, state, numbers, elements
        self._flat = [name for name, array in state.items() if array.ndim]

    def update(self) -> KernelPass:
        """Returns the pass that moves the values."""

        def formula(given: dict[str, Any], state: State, step: Step) -> dict[str, Any]:
            direction, changed = self._rule.update(given["g"], state, step)
            return {"step": direction} | {f"state.{n}": v for n, v in changed.items() if n in self._flat}

        blocks = -(-self._arena.size // (4 * _THREADS))
        how = "change" if getattr(self._rule, "moves", False) else "move"
        return self._pass(self._rule.name, _UPDATE, blocks, formula, how=how)

    def terms(self, rule: TermsRule) -> KernelPass:
        """Returns the pass that sums, before the values are moved."""
        names: list[str] = []

        def formula(given: dict[str, Any], state: State, step: Step) -> dict[str, Any]:
            terms, changed = rule.terms(given["g"], state, step)
            names.extend(terms)
            return {f"term.{n}": v for n, v in terms.items()} | {f"state.{n}": v for n, v in changed.items()}

        return self._pass(f"{self._rule.name}_terms", _TERMS, _SUM_BLOCKS, formula, names)

    def _pass(
        self,
        name: str,
        template: str,
        blocks: int,
        formula: Callable[..., Any],
        sums: Sequence[str] = (),
        how: str = "",
    ) -> KernelPass:
        arena, flat = self._arena, self._flat
        operands = {"g": "g.e[k]", "p": "p.e[k]", "rate": "now[RATE]"}
        operands |= {f"state.{n}": f"s{i}.e[k]" for i, n in enumerate(flat)}
        operands |= {f"number.{n}": f"now[{n.upper()}]" for n in self._numbers}
        scales = {"lr_scale": arena.lr_scale, "decay_scale": arena.decay_scale}
        scales = {n: a for n, a in scales.items() if a is not None}
        operands |= {n: f"{n}4.e[k]" for n in scales}

        def traced(xp: Namespace, given: dict[str, Any]) -> dict[str, Any]:
            element: Any = _Element(given["p"], given.get("lr_scale"), given.get("decay_scale"))
            numbers = {n: given[f"number.{n}"] for n in self._numbers}
            step = Step(xp, element, None, numbers=numbers, rate=given["rate"])
            result: dict[str, Any] = formula(given, {n: given[f"state.{n}"] for n in flat}, step)
            return result

        lines, results = self._elements(traced, operands)
        written = {n.removeprefix("state."): text for n, text in results.items() if n.startswith("state.")}
        found = _sums(arena, sums, blocks)
        text = template.format(
            name=name,
            how=how,
            parameters="".join(f", float* state{i}" for i in range(len(flat))) + (", double* sums" if sums else ""),
            scales="".join(f"  const Four {n}4 = four({n}, i);\n" for n in scales),
            states="".join(f"  Four s{i} = four(state{i}, i);\n" for i in range(len(flat))),
            lines="".join(f"    {line}\n" for line in lines),
            step=results.get("step"),
            changes="".join(f"    s{flat.index(n)}.e[k] = {text};\n" for n, text in written.items()),
            stores="".join(f"  store<float, 4>(state{flat.index(n)} + i, s{flat.index(n)}.e);\n" for n in written),
            count=len(sums),
            adds="".join(f"    total[{i}] += (double){results[f'term.{n}']};\n" for i, n in enumerate(sums)),
        )
        args = (*(self._state[n] for n in flat), *([found] if sums else []))
        return KernelPass(name, text, blocks, _THREADS, args, dict(zip(sums, found, strict=True)))


_COMMON = """
    const float* grads, float* values, float* mean, T* low, const float* lr_scale, const float* decay_scale,
    const unsigned char* filled, const float* now, const long long* count, long long seed, long long n"""

_ARENA = "  const FlatParameters arena = {{grads, values, mean, low, lr_scale, decay_scale, filled, now, count, seed}};"

_UPDATE = f"""
extern "C" __global__ void __launch_bounds__(256) {{name}}({_COMMON}{{parameters}}) {{{{
  const long long i = 4 * (blockIdx.x * (long long)blockDim.x + threadIdx.x);
  if (i >= n || now[APPLY] == 0.f) return;
{_ARENA}
  const Four g = arena.gradient(i), p = four(values, i);
{{scales}}{{states}}  Four step;
#pragma unroll
  for (int k = 0; k < 4; k++) {{{{
{{lines}}    step.e[k] = {{step}};
{{changes}}  }}}}
{{stores}}  arena.{{how}}(p, step, i);
}}}}
"""

_TERMS = f"""
extern "C" __global__ void __launch_bounds__(256) {{name}}({_COMMON}{{parameters}}) {{{{
  if (now[APPLY] == 0.f) return;
{_ARENA}
  double total[{{count}}] = {{{{}}}};
  const long long stride = 4ll * gridDim.x * blockDim.x;
  for (long long i = 4 * (blockIdx.x * (long long)blockDim.x + threadIdx.x); i < n; i += stride) {{{{
  const Four g = arena.gradient(i), p = four(values, i);
{{scales}}{{states}}
#pragma unroll
  for (int k = 0; k < 4; k++) {{{{
{{lines}}{{adds}}{{changes}}  }}}}
{{stores}}  }}}}
  for (int j = 0; j < {{count}}; j++) {{{{
    const double sum = block_sum<256>(total[j]);
    if (threadIdx.x == 0) sums[j * gridDim.x + blockIdx.x] = sum;
  }}}}
}}}}
"""

_BY_KERNEL = f"""
constexpr int THREADS = {{threads}};
{{constants}}#include "optim/matrices.cuh"
{{text}}
// At 1024 threads a multiprocessor, some blocks read while others sum.
extern "C" __global__ void __launch_bounds__({{threads}}, 1024 / {{threads}})
{{name}}({_COMMON}{{parameters}}, double* sums) {{{{
  if (now[APPLY] == 0.f) return;
{_ARENA}
  update_by_rule(arena{{arguments}}, sums);
}}}}
"""
