"""The kernel that updates the arena by a rule, generated from the rule's own Python.

`Rule.update` is called once with elements that record what is done to them. Each operation is rounded for itself. So
the kernel gives the bits of the reference, which runs the same Python over whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtype import float32
from ..namespace import Namespace
from .flat_parameters import FlatParameters
from .transform import Rule, State, Step

Elements = Callable[
    [Callable[[Any, dict[str, Any]], Mapping[str, Any]], Mapping[str, str]], tuple[list[str], dict[str, str]]
]
"""Traces a formula over single elements; see `backend/cuda/codegen/scalars.py`."""


@dataclass(frozen=True, slots=True)
class _Element:
    """The arena as a rule sees it element by element."""

    values: Any
    decay_scale: Any


def flat_states(arena: FlatParameters, state: State) -> list[str]:
    """The names of a rule's flat arrays, in order."""
    return [name for name, array in state.items() if array.ndim]


def fuses(rule: Any, state: State) -> bool:
    """Whether a rule's update can be one kernel."""
    return bool(getattr(rule, "elementwise", False)) and all(a.dtype == float32 for a in state.values() if a.ndim)


def kernel_text(rule: Rule, arena: FlatParameters, state: State, numbers: Sequence[str], elements: Elements) -> str:
    """The kernel `rule.name` in CUDA C, to stand behind update.cuh.

    `numbers` are the names of the rule's single numbers, which the kernel reads from `now`.
    """
    flat = flat_states(arena, state)
    operands = {"g": "g.e[k]", "p": "p.e[k]"}
    operands |= {f"state.{name}": f"s{i}.e[k]" for i, name in enumerate(flat)}
    operands |= {f"number.{name}": f"now[{name.upper()}]" for name in numbers}
    if arena.decay_scale is not None:
        operands["decay_scale"] = "d.e[k]"

    def formula(xp: Namespace, given: dict[str, Any]) -> dict[str, Any]:
        element: Any = _Element(given["p"], given.get("decay_scale"))
        step = Step(xp, element, None, numbers={name: given[f"number.{name}"] for name in numbers})
        direction, changed = rule.update(given["g"], {name: given[f"state.{name}"] for name in flat}, step)
        return {"step": direction} | {f"state.{name}": value for name, value in changed.items()}

    lines, results = elements(formula, operands)
    written = {name.removeprefix("state."): text for name, text in results.items() if name != "step"}
    return _TEXT.format(
        name=rule.name,
        parameters="".join(f", float* state{i}" for i in range(len(flat))),
        decay="  const Four d = four(decay_scale, i);\n" if arena.decay_scale is not None else "",
        states="".join(f"  Four s{i} = four(state{i}, i);\n" for i in range(len(flat))),
        lines="".join(f"    {line}\n" for line in lines),
        step=results["step"],
        changes="".join(f"    s{flat.index(name)}.e[k] = {text};\n" for name, text in written.items()),
        stores="".join(f"  store<float, 4>(state{flat.index(n)} + i, s{flat.index(n)}.e);\n" for n in written),
    )


_TEXT = """
extern "C" __global__ void __launch_bounds__(256) {name}(
    const float* grads, float* values, float* mean, T* low, const float* lr_scale, const float* decay_scale,
    const unsigned char* filled, const float* now, const long long* count, long long seed, long long n{parameters}) {{
  const long long i = 4 * (blockIdx.x * (long long)blockDim.x + threadIdx.x);
  if (i >= n || now[TAKE] == 0.f) return;
  const FlatParameters arena = {{grads, values, mean, low, lr_scale, filled, now, count, seed}};
  const Four g = arena.gradient(i), p = four(values, i);
{decay}{states}  Four step;
#pragma unroll
  for (int k = 0; k < 4; k++) {{
{lines}    step.e[k] = {step};
{changes}  }}
{stores}  arena.move(p, step, i);
}}
"""
