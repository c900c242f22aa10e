"""`elementwise`: a Python function of numbers as an op, one kernel forward and one for each gradient."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import kind_of
from .arguments import named
from .op import Op
from .ops.common.elementwise_codegen import elementwise_kernel
from .symbolic import Scalar, arguments, c_text, evaluate, gradient, names_in

_TAKEN = frozenset(
    """
    auto bool break case char class const continue default delete do double else enum extern float for goto if int long
    new operator register return short signed sizeof static struct switch template this typedef union unsigned void
    volatile while true false g out xp sigmoid sign larger smaller I
    """.split()
)
"""Words that mean something in a kernel, and so name no argument."""


class ElementwiseFunction:
    """What `elementwise` makes of a Python function: called on tensors an op, on numbers of a trace part of that."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.__name__, self.__doc__ = fn, getattr(fn, "__name__", "elementwise"), fn.__doc__
        self.__signature__ = inspect.signature(fn)
        self.op = _declared(fn, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, Scalar) for v in (*args, *kwargs.values())):
            return self.fn(*args, **kwargs)
        return self.op(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<elementwise function {self.__name__}>"

    def in_c(self) -> str:
        """Returns the forward kernel's expression."""
        traced = arguments(self.op.names)
        return c_text(_traced(self.fn, traced, self.__name__))


def elementwise(fn: Callable[..., Any]) -> ElementwiseFunction:
    """Makes an op of `fn`, a function of single numbers: one kernel on a GPU, with gradients, and NumPy on the CPU.

    The function is run once, on symbols. It may use Python's operators, comparisons, the methods of a number, and
    NumPy's functions. It may use ops such as `F.relu` and `F.where`, and other elementwise functions, which become part
    of the same kernel. Arguments are tensors, which broadcast, or Python numbers. Raises TypeError for a function that
    branches on a value, returns no number, or has arguments that cannot be named in a kernel.

    >>> import flame_train.engine as flame
    >>> from flame_train.engine import functional as F
    >>> @elementwise
    ... def shifted(x, by=1.0):
    ...     return F.relu(x + by)
    >>> x = flame.tensor([-2.0, 3.0], requires_grad=True)
    >>> y = shifted(x)
    >>> y.tolist()
    [0.0, 4.0]
    >>> y.sum().backward()
    >>> x.grad.tolist()
    [0.0, 1.0]
    """
    if not callable(fn):
        raise TypeError(f"elementwise: expected a function of numbers, got {kind_of(fn)}")
    return ElementwiseFunction(fn)


def _declared(fn: Callable[..., Any], name: str) -> Op:
    given = list(inspect.signature(fn).parameters.values())
    for p in given:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in _TAKEN or not re.fullmatch(r"[a-zA-Z]\w*", p.name):
            raise TypeError(f"{name}: argument {str(p)!r} cannot be named in a kernel; give it another name")
    names = [p.name for p in given]
    *traced, g = arguments([*names, "g"])
    out = _traced(fn, traced, name)

    def reference(xp: Any, *args: Any, **kwargs: Any) -> Any:
        return evaluate(out, xp, dict(zip(names, args, strict=False)) | kwargs)

    kinds = [p.replace(annotation="Array | float") for p in given]
    vars(reference)["__signature__"] = inspect.Signature(
        [inspect.Parameter("xp", inspect.Parameter.POSITIONAL_OR_KEYWORD), *kinds]
    )
    reference.__name__, reference.__doc__ = name, fn.__doc__ or f"{name}, element by element"
    op = Op(reference, composite=False, torch=None, aux=(), data_movement=False, multiple=False, registered=False)
    texts = {}
    for argument in traced:
        slope = gradient(out, argument, g)
        if isinstance(slope, Scalar):
            used = names_in(slope)
            formula = named(partial(_formula, slope, used), ["xp", "g", *[n for n in used if n != "g"]])
            op.vjp(argument.name)(formula)
            texts[argument.name] = c_text(slope)
        else:
            op.non_differentiable(argument.name)
    elementwise_kernel(op, c_text(out), gradients=texts)
    return op


def _formula(slope: Scalar, used: tuple[str, ...], xp: Any, g: Any, *values: Any) -> Any:
    return evaluate(slope, xp, {"g": g} | dict(zip([n for n in used if n != "g"], values, strict=True)))


def _traced(fn: Callable[..., Any], traced: list[Scalar], name: str) -> Scalar:
    positional = {s.name: s for s in traced}
    by_name = {p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
    args = [s for n, s in positional.items() if n not in by_name]
    out = fn(*args, **{n: positional[n] for n in by_name})
    if not isinstance(out, Scalar):
        raise TypeError(f"{name}: expected the function to return a number made of its arguments, got {out!r}")
    return out
