"""Functions of single numbers as expressions: traced from Python, evaluated on arrays, differentiated, written in C.

A `Scalar` stands for a number while a function is traced. Python's operators, its methods, NumPy's functions and ops
such as `F.relu` make larger ones. Equal expressions are one object, so that each is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import kind_of
from .dtype import Array
from .namespace import Namespace
from .op import REGISTRY

Operand = Any
"""A `Scalar` or a Python number."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How an elementary function is written in C, computed on arrays, and differentiated.

    `slopes` gives, from the operands and the result, the derivative with respect to each operand.
    """

    text: str
    compute: Callable[..., Array]
    slopes: Callable[..., Sequence[Operand]]


class Scalar:
    """A number of a traced function. Raises `TypeError` where the function asks for its value."""

    __slots__ = ("args", "made", "name", "rule")
    __array_priority__ = 2000

    def __init__(self, made: dict[Any, Scalar], rule: str, args: tuple[Operand, ...], name: str = "") -> None:
        self.made, self.rule, self.args, self.name = made, rule, args, name

    def of(self, rule: str, *args: Operand) -> Scalar:
        """Returns the elementary function `rule` of operands, some of which are of this trace."""
        args = tuple(a.item() if isinstance(a, np.generic) else a for a in args)
        for a in args:
            if not isinstance(a, (Scalar, bool, int, float)):
                raise TypeError(f"elementwise: expected numbers, got {kind_of(a)}; give tensors as arguments")
        key = (rule, *((True, id(a)) if isinstance(a, Scalar) else (False, float(a)) for a in args))
        if key not in self.made:
            self.made[key] = Scalar(self.made, rule, args)
        return self.made[key]

    def apply_op(self, name: str, values: Mapping[str, Any]) -> Any:
        """An op of the registry, called on numbers of this trace. Raises TypeError for one that is not elementwise."""
        made = _OPS.get(name)
        if made is None:
            raise TypeError(f"{name}: not known in an elementwise function; there are {', '.join(sorted(_OPS))}")
        return made(self, **values)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        name = _UFUNCS.get(ufunc.__name__, ufunc.__name__)
        if method != "__call__" or kwargs or name not in _OPS:
            return NotImplemented
        return REGISTRY[name](*[a.item() if hasattr(a, "item") else a for a in args])

    def __getattr__(self, name: str) -> Any:
        if name in _OPS:
            return lambda *args, **kwargs: REGISTRY[name](self, *args, **kwargs)
        raise AttributeError(f"an elementwise function knows no {name!r}; there are {', '.join(sorted(_OPS))}")

    def __add__(self, other: Operand) -> Scalar:
        return self.of("add", self, other)

    def __radd__(self, other: Operand) -> Scalar:
        return self.of("add", other, self)

    def __sub__(self, other: Operand) -> Scalar:
        return self.of("sub", self, other)

    def __rsub__(self, other: Operand) -> Scalar:
        return self.of("sub", other, self)

    def __mul__(self, other: Operand) -> Scalar:
        return self.of("mul", self, other)

    def __rmul__(self, other: Operand) -> Scalar:
        return self.of("mul", other, self)

    def __truediv__(self, other: Operand) -> Scalar:
        return self.of("div", self, other)

    def __rtruediv__(self, other: Operand) -> Scalar:
        return self.of("div", other, self)

    def __pow__(self, exponent: Operand) -> Scalar:
        if isinstance(exponent, (int, float)) and exponent == 2:
            return self.of("mul", self, self)
        return self.of("pow", self, exponent)

    def __rpow__(self, base: Operand) -> Scalar:
        return self.of("pow", base, self)

    def __neg__(self) -> Scalar:
        return self.of("neg", self)

    def __abs__(self) -> Scalar:
        return self.of("abs", self)

    def __lt__(self, other: Operand) -> Scalar:
        return self.of("lt", self, other)

    def __le__(self, other: Operand) -> Scalar:
        return self.of("le", self, other)

    def __gt__(self, other: Operand) -> Scalar:
        return self.of("lt", other, self)

    def __ge__(self, other: Operand) -> Scalar:
        return self.of("le", other, self)

    def __bool__(self) -> bool:
        raise TypeError("an elementwise function must not branch on a value: use F.where(condition, a, b)")


def arguments(names: Sequence[str]) -> list[Scalar]:
    """Returns the numbers that a function of these arguments is traced with."""
    made: dict[Any, Scalar] = {}
    for name in names:
        made["argument", name] = Scalar(made, "argument", (), name)
    return [made["argument", name] for name in names]


def gradient(out: Scalar, wrt: Scalar, g: Scalar) -> Operand:
    """g * d out / d wrt as an expression; 0 where `out` does not depend on `wrt`."""
    grads: dict[int, Operand] = {id(out): g}
    for node in reversed(_ordered(out)):
        if node is wrt or node.rule == "argument" or id(node) not in grads:
            continue
        for arg, share in zip(node.args, _shares(node, grads[id(node)]), strict=True):
            if isinstance(arg, Scalar) and share is not None and any(part is wrt for part in _ordered(arg)):
                grads[id(arg)] = grads[id(arg)] + share if id(arg) in grads else share
    return grads.get(id(wrt), 0.0)


def _shares(node: Scalar, arrived: Operand) -> list[Operand]:
    """Returns the gradients of a part's operands; what `where` did not take gets 0, whatever arrived."""
    if node.rule == "where":
        condition = node.args[0]
        return [None, _where(condition, arrived, 0.0), _where(condition, 0.0, arrived)]
    slopes = RULES[node.rule].slopes(*node.args, node)
    return [None if s is None else arrived if isinstance(s, int) and s == 1 else arrived * s for s in slopes]


def evaluate(out: Scalar, xp: Namespace, values: Mapping[str, Any]) -> Array:
    """Returns the expression over arrays or numbers by argument's name."""
    found: dict[int, Any] = {}
    for node in _ordered(out):
        if node.rule == "argument":
            found[id(node)] = values[node.name]
        else:
            args = [found[id(a)] if isinstance(a, Scalar) else a for a in node.args]
            found[id(node)] = RULES[node.rule].compute(xp, *args)
    return found[id(out)]


def c_text(out: Scalar) -> str:
    """Returns the expression in C over the arguments' names: statements for what is used twice, then the value."""
    order = _ordered(out)
    uses: dict[int, int] = {}
    for node in order:
        for a in node.args:
            uses[id(a)] = uses.get(id(a), 0) + 1
    text: dict[int, str] = {}
    lines: list[str] = []
    for node in order:
        if node.rule == "argument":
            text[id(node)] = node.name
            continue
        args = [text[id(a)] if isinstance(a, Scalar) else _number(a) for a in node.args]
        made = f"({RULES[node.rule].text.format(*args)})"
        if uses.get(id(node), 0) > 1:
            lines.append(f"float flame_{len(lines)} = {made};")
            made = f"flame_{len(lines) - 1}"
        text[id(node)] = made
    return " ".join([*lines, text[id(out)]])


def names_in(out: Scalar) -> tuple[str, ...]:
    """Returns the arguments that the expression reads."""
    return tuple(node.name for node in _ordered(out) if node.rule == "argument")


def _ordered(out: Scalar) -> list[Scalar]:
    """Returns all parts of an expression, each after those that it is made of."""
    found: dict[int, Scalar] = {}
    stack: list[tuple[Scalar, bool]] = [(out, False)]
    while stack:
        node, done = stack.pop()
        if done:
            found.setdefault(id(node), node)
        elif id(node) not in found:
            stack.append((node, True))
            stack.extend((a, False) for a in node.args if isinstance(a, Scalar))
    return list(found.values())


def _number(value: float) -> str:
    number = float(value)
    if math.isnan(number):
        raise ValueError("elementwise: nan is no constant of a kernel")
    if math.isinf(number):
        return "INFINITE" if number > 0 else "(-INFINITE)"
    return f"{number!r}f" if number >= 0 else f"({number!r}f)"


def _truth(xp: Namespace, found: Array, like: Any) -> Array:
    """Returns a comparison as 1 and 0, in the dtype of what was compared."""
    return found.astype(getattr(like, "dtype", "float32"))


def _like(a: Any, b: Any) -> Any:
    return a if hasattr(a, "dtype") else b


def _where(condition: Operand, a: Operand, b: Operand) -> Scalar:
    return next(v for v in (condition, a, b) if isinstance(v, Scalar)).of("where", condition, a, b)


def _erf(xp: Namespace, x: Array) -> Array:
    return REGISTRY["erf"].fn(xp, x)


_ROOT_PI = 2.0 / math.sqrt(math.pi)

_NONE = (None, None)

RULES: dict[str, Rule] = {
    "add": Rule("{0} + {1}", lambda xp, a, b: a + b, lambda a, b, y: (1, 1)),
    "sub": Rule("{0} - {1}", lambda xp, a, b: a - b, lambda a, b, y: (1, -1)),
    "mul": Rule("{0} * {1}", lambda xp, a, b: a * b, lambda a, b, y: (b, a)),
    "div": Rule("{0} / {1}", lambda xp, a, b: a / b, lambda a, b, y: (1 / b, -y / b)),
    "neg": Rule("-{0}", lambda xp, a: -a, lambda a, y: (-1,)),
    "pow": Rule(
        "powf({0}, {1})",
        lambda xp, a, b: a**b,
        lambda a, b, y: (b * y.of("pow", a, b - 1), y * y.of("log", a) if isinstance(b, Scalar) else None),
    ),
    "exp": Rule("e_to({0})", lambda xp, a: xp.exp(a), lambda a, y: (y,)),
    "expm1": Rule("expm1f({0})", lambda xp, a: xp.expm1(a), lambda a, y: (y + 1,)),
    "log": Rule("logf({0})", lambda xp, a: xp.log(a), lambda a, y: (1 / a,)),
    "log1p": Rule("log1pf({0})", lambda xp, a: xp.log1p(a), lambda a, y: (1 / (a + 1),)),
    "sqrt": Rule("sqrtf({0})", lambda xp, a: xp.sqrt(a), lambda a, y: (0.5 / y,)),
    "sin": Rule("sinf({0})", lambda xp, a: xp.sin(a), lambda a, y: (y.of("cos", a),)),
    "cos": Rule("cosf({0})", lambda xp, a: xp.cos(a), lambda a, y: (-y.of("sin", a),)),
    "tanh": Rule("tanhf({0})", lambda xp, a: xp.tanh(a), lambda a, y: (1 - y * y,)),
    "sigmoid": Rule("sigmoid({0})", lambda xp, a: 1.0 / (1.0 + xp.exp(-a)), lambda a, y: (y * (1 - y),)),
    "erf": Rule("erff({0})", _erf, lambda a, y: (_ROOT_PI * y.of("exp", -(a * a)),)),
    "abs": Rule("fabsf({0})", lambda xp, a: xp.abs(a), lambda a, y: (y.of("sign", a),)),
    "sign": Rule("sign({0})", lambda xp, a: xp.sign(a), lambda a, y: (None,)),
    "floor": Rule("floorf({0})", lambda xp, a: xp.floor(a), lambda a, y: (None,)),
    "maximum": Rule(
        "larger({0}, {1})",
        lambda xp, a, b: xp.maximum(a, b),
        lambda a, b, y: (_share(y, a, b, "lt"), _share(y, b, a, "lt")),
    ),
    "minimum": Rule(
        "smaller({0}, {1})",
        lambda xp, a, b: xp.minimum(a, b),
        lambda a, b, y: (_share(y, a, b, "gt"), _share(y, b, a, "gt")),
    ),
    "relu": Rule("larger({0}, 0.f)", lambda xp, a: xp.maximum(a, 0.0), lambda a, y: (1 - y.of("le", y, 0.0),)),
    "lt": Rule("{0} < {1} ? 1.f : 0.f", lambda xp, a, b: _truth(xp, a < b, _like(a, b)), lambda a, b, y: _NONE),
    "le": Rule("{0} <= {1} ? 1.f : 0.f", lambda xp, a, b: _truth(xp, a <= b, _like(a, b)), lambda a, b, y: _NONE),
    "eq": Rule("{0} == {1} ? 1.f : 0.f", lambda xp, a, b: _truth(xp, a == b, _like(a, b)), lambda a, b, y: _NONE),
    "where": Rule(
        "{0} != 0.f ? {1} : {2}",
        lambda xp, c, a, b: xp.where(c != 0, a, b).astype(_like(c, _like(a, b)).dtype, copy=False),
        lambda c, a, b, y: (None, None, None),  # see `_shares`
    ),
}
"""The elementary functions."""


def _share(y: Scalar, mine: Operand, other: Operand, loses: str) -> Scalar:
    """Returns the part of the gradient of an extreme that goes to `mine`: all, half at a tie, none where it loses."""
    lost = y.of("lt", mine, other) if loses == "lt" else y.of("lt", other, mine)
    return _where(y.of("eq", mine, other), 0.5, 1 - lost)


def _clamp(s: Scalar, input: Operand, min: Operand = None, max: Operand = None) -> Operand:
    low = input if min is None else s.of("maximum", input, min)
    return low if max is None else s.of("minimum", low, max)


def _div(s: Scalar, input: Operand, other: Operand, rounding_mode: str | None) -> Operand:
    if rounding_mode not in (None, "floor"):
        raise TypeError(f"div: rounding_mode {rounding_mode!r} is not known in an elementwise function")
    found = s.of("div", input, other)
    return found if rounding_mode is None else s.of("floor", found)


def _gelu(s: Scalar, input: Scalar, approximate: str) -> Scalar:
    if approximate == "tanh":
        return input * s.of("sigmoid", 2.0 * math.sqrt(2.0 / math.pi) * (input + 0.044715 * input * input * input))
    return input * 0.5 * (1.0 + s.of("erf", input * math.sqrt(0.5)))


def _softplus(s: Scalar, input: Scalar, beta: float, threshold: float) -> Scalar:
    x = beta * input
    soft = s.of("maximum", x, 0.0) + s.of("log1p", s.of("exp", -s.of("abs", x)))
    return _where(s.of("lt", threshold, x), input, soft / beta)


_UNARY = "neg exp expm1 log log1p sqrt sin cos tanh sigmoid erf abs sign floor relu".split()
_BINARY = ("mul", "maximum", "minimum", "lt", "le", "eq")
_UFUNCS = {
    "absolute": "abs",
    "divide": "div",
    "equal": "eq",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "power": "pow",
    "subtract": "sub",
    "true_divide": "div",
}
"""NumPy's functions under the names of the ops."""
_OPS: dict[str, Callable[..., Any]] = {
    **{n: (lambda s, input, n=n: s.of(n, input)) for n in _UNARY},
    **{n: (lambda s, input, other, n=n: s.of(n, input, other)) for n in _BINARY},
    "add": lambda s, input, other, alpha: s.of("add", input, other if alpha == 1 else alpha * other),
    "sub": lambda s, input, other, alpha: s.of("sub", input, other if alpha == 1 else alpha * other),
    "div": _div,
    "pow": lambda s, input, exponent: input**exponent,
    "gt": lambda s, input, other: s.of("lt", other, input),
    "ge": lambda s, input, other: s.of("le", other, input),
    "square": lambda s, input: s.of("mul", input, input),
    "reciprocal": lambda s, input: s.of("div", 1.0, input),
    "rsqrt": lambda s, input: s.of("div", 1.0, s.of("sqrt", input)),
    "where": lambda s, condition, input, other: _where(condition, input, other),
    "clamp": _clamp,
    "leaky_relu": lambda s, input, negative_slope: _where(s.of("lt", 0.0, input), input, negative_slope * input),
    "silu": lambda s, input: input * s.of("sigmoid", input),
    "gelu": _gelu,
    "softplus": _softplus,
    "lerp": lambda s, input, end, weight: input + weight * (end - input),
}
"""Ops of the registry by what they are made of: what an elementwise function may call."""
