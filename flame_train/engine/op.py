"""How an operation is declared: the decorators `primitive` and `composite`, and the registry. `dispatch.py` runs it.

An op is one stanza: a reference on the array namespace `xp` (NumPy or CuPy), gradient formulas (vector-Jacobian
products, VJPs), and samples. Where it pays it has kernels. Its signature is its declaration: parameters annotated
`Array`, `Array | None`, `Array | float`, `Array | float | None` or `Sequence[Array]` are tensors, the others are
attributes, in PyTorch's order. Keyword-only parameters are PyTorch's. A list that comes last may be given spread out:
`f(a, b)` for `f([a, b])`.

Eight rules hold everywhere, so that no op has to implement them:

- A formula's parameter names say what is saved for it: inputs, attributes, `aux` values, `out`, and
  `<input>_shape` where the shape alone will do. A formula that is not needed saves nothing.
- References see fp32 or fp64: narrower floats are raised before and rounded once after. Ops that only move
  data (`data_movement=True`) opt out.
- Integers and booleans are raised to the dtype of the other floats, or to fp32. They are not where the op or the
  argument is declared to take them as they are (`accepts_integers`). They are not where the argument has no gradient by
  nature (`non_differentiable`).
- Gradients are summed down to a broadcast input's shape, and cast to its dtype, in the backward pass.
- A formula may ask for more than what was saved, by a parameter's name. `needs`: the names of the arguments whose
  gradients are wanted. `targets`: where these go (`grad_target.GradTargets`): a gradient that has arrived there already
  and to which the formula must add its own. They name memory too that it may write the
  result to.
- An op whose outputs are views that hold each element of its input exactly once (`views=True`, such as `split`) lends
  parts of one buffer. This is the input's gradient, lent to whoever computes its outputs' gradients. Its own formula's
  target is that buffer if all the lent parts were written, and then it has nothing to copy.
- Formulas, kernels and guards may take values that travel together as one dataclass (`arguments.Arguments`).
- A kernel is only ever an override of a reference. The choice looks at shapes, dtypes, strides and
  attributes, never at values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ShapeError, Unsupported
from . import lazy
from .arguments import Guard, When, names_of, parameters_of, public_signature, spread
from .counterparts import NUMPYS, UNKNOWN_ARGUMENTS
from .declared_samples import DeclaredError, DeclaredSample, made
from .declared_samples import ErrorSample as ErrorSample
from .declared_samples import Sample as Sample
from .declared_samples import sample as sample

Whens = When | tuple[When, ...] | None


@dataclass(frozen=True, slots=True)
class VJP:
    """The gradient with respect to `args`.

    - `names`: the values it reads, which are therefore saved for it.
    - `takes`: what it asks for of `VJP_EXTRAS`.
    - `promotes`: floats narrower than fp32 are raised to it first.
    - `accumulates`: it adds to what has arrived at its targets.
    """

    args: tuple[str, ...]
    fn: Callable[..., Any]
    names: tuple[str, ...]
    takes: frozenset[str]
    impl: str = "reference"
    when: Guard | None = None
    promotes: bool = False
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A forward override: a host launcher that allocates, launches and returns."""

    impl: str
    fn: Callable[..., Any]
    when: Guard | None
    names: tuple[str, ...]
    """The inputs and attributes that it reads."""


VJP_EXTRAS = frozenset(("needs", "targets"))
"""What a formula may ask for besides saved values; see the module's docstring."""

LAYOUTS = ("NCHW", "NHWC")
"""The values of an op's `layout` argument: where an image's channels are."""


class Registry(dict[str, "Op"]):
    """The declared ops by name. One of the library joins them when it is asked for. Written at import only."""

    def __missing__(self, name: str) -> Op:
        return lazy.attribute(lazy.OPS, name)


REGISTRY = Registry()


class Op:
    """A named operation. Calling it runs it on Tensors; see the module's docstring.

    `params` are all parameters in order, `names` their names. `positional` are those that may be given by position and
    `tensor_names` those that are tensors or lists of them. Of the latter, `promoted` are cast from integers to floats,
    `list_names` are lists, `number_names` may be Python numbers and `optional_names` None.

    Args:
        fn, composite: the reference, or the body of a composite.
        torch, aux, data_movement, multiple, views, accepts_integers, rounds_scalars: as in `primitive`.
        mutates: names of the arguments that it writes to.
        registered: whether the registry lists it.

    Raises:
        ValueError: the name is taken.
    """

    _run: ClassVar[Callable[[Op, dict[str, Any]], Any]]
    """Set by dispatch.py, which imports this module. To import it here at every call would take microseconds."""
    fill_in: Callable[[dict[str, Any]], None] | None = None
    """Gives a call's values what they lack and what depends on the surroundings, such as random numbers."""
    batched_dims: int = 0
    """The dims of `input` with its batch, where an input of one dim fewer is taken for a batch of one."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        composite: bool,
        torch: str | None,
        aux: tuple[str, ...],
        data_movement: bool,
        multiple: bool,
        views: bool = False,
        mutates: tuple[str, ...] = (),
        accepts_integers: bool | tuple[str, ...] = (),
        rounds_scalars: bool = False,
        registered: bool = True,
    ) -> None:
        self.name = fn.__name__
        self.fn = fn
        self.composite, self.torch, self.aux = composite, torch, aux
        self.data_movement, self.views, self.multiple = data_movement, views, multiple
        self.mutates, self.rounds_scalars = mutates, rounds_scalars
        self.params = parameters_of(fn, skip_first=not composite)
        self.names = tuple(p.name for p in self.params)
        self.positional = tuple(p.name for p in self.params if not p.named)
        self.tensor_names = tuple(p.name for p in self.params if p.kind != "attr")
        exempt: tuple[str, ...] = () if isinstance(accepts_integers, bool) else accepts_integers
        if composite or data_movement or accepts_integers is True:
            exempt = self.tensor_names
        self.promoted = frozenset(self.tensor_names) - frozenset(exempt)
        self.list_names = frozenset(p.name for p in self.params if p.kind == "list")
        self.number_names = frozenset(p.name for p in self.params if "float" in p.also)
        self.optional_names = frozenset(p.name for p in self.params if "None" in p.also)
        self._defaults = {p.name: p.default for p in self.params}
        self._required = tuple(n for n, default in self._defaults.items() if default is inspect.Parameter.empty)
        self._laid = "layout" in self.names
        self._list_last = bool(self.positional) and self.positional[-1] in self.list_names
        self.formulas: list[VJP] = []
        self.kernel_formulas: list[VJP] = []
        self.kernels: list[Kernel] = []
        self._guards: dict[When | tuple[When, ...], Guard] = {}
        self.non_differentiable_names: set[str] = set()
        self.unsupported_grads: set[str] = set()
        self._samples: tuple[DeclaredSample, ...] = ()
        self._perf_samples: tuple[DeclaredSample, ...] = ()
        self._errors: tuple[DeclaredError, ...] = ()
        self.__doc__, self.__name__ = fn.__doc__, self.name
        self.__signature__ = public_signature(fn, skip_first=not composite)
        if registered:
            if self.name in REGISTRY:
                raise ValueError(f"op {self.name}: declared twice")
            REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self.bind(args, kwargs)
        if self.fill_in is not None:
            self.fill_in(values)
        return self._run(values)

    def vjp(self, *args: str, accumulates: bool = True) -> Callable[[Callable[..., Any]], None]:
        """Declares the gradient for `args` as `f(xp, g, <names>)`; several args return a tuple.

        A formula that takes `targets` adds what has arrived there, unless it is declared with `accumulates=False`: then
        nothing has arrived at its targets.
        """

        def declare(fn: Callable[..., Any]) -> None:
            self.formulas.append(self._formula(args, fn, "reference", None, accumulates))

        return declare

    def non_differentiable(self, *args: str) -> None:
        """Declares that `args` have no gradient by nature: indices, masks."""
        self._check_names("non_differentiable", args)
        self.non_differentiable_names.update(args)
        self.promoted -= frozenset(args)

    def grad_unsupported(self, *args: str) -> None:
        """Declares that `args` have no gradient although one would make sense, because PyTorch has none either.

        A call in which one of them requires grad raises `Unsupported`.
        """
        self._check_names("grad_unsupported", args)
        self.unsupported_grads.update(args)

    def samples(self, *given: DeclaredSample) -> None:
        """Declares the samples on which the generated tests run the op."""
        self._samples = given

    def perf_samples(self, *given: DeclaredSample) -> None:
        """Declares samples of the sizes kernels are made for: checked against the reference, and timed."""
        self._perf_samples = given

    def errors(self, *given: DeclaredError) -> None:
        """Declares inputs that must be refused, with the error and message they must raise."""
        self._errors = given

    def cuda(self, impl: str, *, when: Whens = None) -> Callable[[Callable[..., Any]], None]:
        """Declares a forward kernel `f(k, <inputs and attributes>)` returning what the reference returns.

        `k` is `backend.cuda.launcher.Launcher`. `when` says of some arguments, by their names, whether the kernel takes
        them: True, or False or the reason why not; of several functions all must agree. Kernels are tried in the order
        in which they are declared.
        """

        def declare(fn: Callable[..., Any]) -> None:
            fn = spread(fn)
            names = names_of(fn)[1:]
            if unknown := set(names).difference(self.names):
                raise TypeError(f"{self.name}.cuda: no arguments named {', '.join(sorted(unknown))}")
            self.kernels.append(Kernel(impl, fn, self._guard(when), names))

        return declare

    def cuda_vjp(
        self, impl: str, *args: str, when: Whens = None, accumulates: bool = True
    ) -> Callable[[Callable[..., Any]], None]:
        """Declares a gradient kernel `f(k, g, <names>)` for `args`; `when` as in `cuda`, `accumulates` as in `vjp`."""

        def declare(fn: Callable[..., Any]) -> None:
            self.kernel_formulas.append(self._formula(args, fn, impl, when, accumulates))

        return declare

    def _formula(self, args: tuple[str, ...], fn: Callable[..., Any], impl: str, when: Whens, accumulates: bool) -> VJP:
        self._check_names("vjp", args)
        fn = spread(fn)
        names = list(names_of(fn)[2:])
        takes = frozenset(names) & VJP_EXTRAS
        names = [n for n in names if n not in VJP_EXTRAS]
        known = {*self.names, *self.aux, "out", "out_shape", *(f"{n}_shape" for n in self.tensor_names)}
        for n in names:
            if n not in known:
                raise TypeError(f"{self.name}.vjp: nothing named {n!r} to save; known: {', '.join(sorted(known))}")
        return VJP(
            args,
            fn,
            tuple(names),
            takes,
            impl,
            self._guard(when),
            promotes=impl == "reference" and not self.data_movement,
            accumulates=accumulates and "targets" in takes,
        )

    def _guard(self, when: Whens) -> Guard | None:
        """Returns `when` as a guard: the same object for the same function, so that dispatch asks each only once."""
        if when is None:
            return None
        return self._guards.setdefault(when, Guard(*when) if isinstance(when, tuple) else Guard(when))

    def _check_names(self, what: str, args: Sequence[str]) -> None:
        for a in args:
            if a not in self.tensor_names:
                raise TypeError(
                    f"{self.name}.{what}: no tensor input named {a!r}; inputs are {list(self.tensor_names)}"
                )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the call's values by parameter name, defaults filled in.

        Raises `TypeError` for arguments that are unknown, missing, given twice or too many, `ShapeError` for an unknown
        `layout`.
        """
        if self._list_last:
            args = self._gathered(args)
        if len(args) > len(self.positional):
            raise TypeError(
                f"{self.name}: takes {len(self.positional)} arguments by position "
                f"({', '.join(self.positional)}), got {len(args)}"
            )
        values = {**self._defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}
        for name in kwargs:
            if name not in self.names or name in self.positional[: len(args)]:
                return self._bind_numpys(args, kwargs)
        for name in self._required:
            if values[name] is inspect.Parameter.empty:
                raise TypeError(f"{self.name}: missing argument {name!r}")
        if self._laid and values["layout"] not in LAYOUTS:
            raise ShapeError(f"{self.name}: expected layout 'NCHW' or 'NHWC', got {values['layout']!r}")
        return values

    def _bind_numpys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values where `kwargs` have NumPy's `axis` for `dim`. Raises TypeError for any other name."""
        given = dict(zip(self.positional, args, strict=False))
        for key, value in kwargs.items():
            name = NUMPYS.get(key, key) if key not in self.names else key
            unset = name != key and (given.get(name) is None or given[name] is False)  # a method's own default
            if name not in self.names or (name in given and not unset):
                hint = UNKNOWN_ARGUMENTS.get(key) or f"takes {', '.join(self.names)}"
                raise TypeError(f"{self.name}: argument {key!r} is unknown or given twice; {hint}")
            given[name] = value
        return self.bind((), given)

    def _gathered(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the positional arguments, those from the last parameter on collected into its list."""
        first = len(self.positional) - 1
        if len(args) <= first or (len(args) == first + 1 and isinstance(args[first], (list, tuple))):
            return args
        return [*args[:first], list(args[first:])]

    def iter_samples(self) -> Iterator[Sample]:
        """Yields the declared samples. Raises `LookupError` if there are none."""
        if not self._samples:
            raise LookupError(f"op {self.name} has no samples")
        return made(self._samples)

    def iter_perf_samples(self) -> Iterator[Sample]:
        """Yields the declared large samples, none if the op has no kernel that needs them."""
        return made(self._perf_samples)

    def iter_errors(self) -> Iterator[ErrorSample]:
        """Yields the declared bad inputs, none if the op declares none."""
        return made(self._errors)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The tensor inputs that have a gradient."""
        if self.composite:
            return tuple(n for n in self.tensor_names if n not in self.non_differentiable_names)
        covered = {a for f in self.formulas for a in f.args}
        return tuple(n for n in self.tensor_names if n in covered)

    def formula_for(self, arg: str, candidates: Sequence[VJP]) -> VJP:
        """Returns the first of `candidates` for `arg`. Raises `Unsupported` if there is none."""
        for f in candidates:
            if arg in f.args:
                return f
        raise Unsupported(f"{self.name}: no gradient with respect to {arg!r}; detach() it if none is wanted")


def primitive(
    *,
    torch: str | None = None,
    aux: tuple[str, ...] = (),
    data_movement: bool = False,
    multiple: bool = False,
    views: bool = False,
    accepts_integers: bool | tuple[str, ...] = (),
    rounds_scalars: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Declares an op by its reference `f(xp, ...)`.

    Args:
        torch: its PyTorch counterpart, "add", "nn.functional.pad" or "Tensor.view".
        aux: names of the values it returns after the result, for its formulas.
        data_movement: it only moves data, so every dtype is taken as it is.
        multiple: its result is a tuple of tensors.
        views: its results are views that hold each element of its one input exactly once; implies `data_movement`.
        accepts_integers: it takes integers and booleans as they are: True for all arguments, or the names of some.
        rounds_scalars: Python numbers are first rounded to the tensors' dtype, as a comparison with tensors requires.

    Returns:
        The decorator, which raises ValueError for a name that is taken.
    """
    return lambda fn: Op(
        fn,
        composite=False,
        torch=torch,
        aux=aux,
        data_movement=data_movement or views,
        multiple=multiple,
        views=views,
        accepts_integers=accepts_integers,
        rounds_scalars=rounds_scalars,
    )


def composite(
    *, torch: str | None = None, aux: tuple[str, ...] = (), mutates: tuple[str, ...] = (), multiple: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Declares an op by a body over Tensors; its gradient is that of the ops in it. A kernel may override all of it.

    `torch`, `aux` and `multiple` are as in `primitive`. `mutates` names the inputs it writes to: running statistics.
    """
    return lambda fn: Op(
        fn, composite=True, torch=torch, aux=aux, data_movement=False, multiple=multiple, mutates=mutates
    )
