"""Products of tensors by named dims, as torch.einsum. A gradient is an einsum of the same kind."""

from __future__ import annotations

import string
from collections.abc import Sequence

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample


@primitive(torch="einsum", accepts_integers=True)
def einsum(xp: Namespace, equation: str, operands: Sequence[Array]) -> Array:
    """The sum over the dims that the equation names on the left only: "bij,bjk->bik" is a matrix product"""
    inputs, output = _parsed(equation, [x.shape for x in operands])
    return xp.einsum(_joined(inputs, output), *operands, optimize=True)


def _joined(inputs: Sequence[str], output: str) -> str:
    return f"{','.join(inputs)}->{output}"


def _parsed(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with "..." spelled out as letters, and "->" filled in."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ShapeError(f"einsum: {equation!r} names {len(terms)} operands, got {len(shapes)}")
    spare = [c for c in string.ascii_letters if c not in equation]
    depth = max(
        (len(s) - len(t.replace("...", "")) for t, s in zip(terms, shapes, strict=True) if "..." in t), default=0
    )
    dots = "".join(spare[: max(depth, 0)])
    inputs = []
    for term, shape in zip(terms, shapes, strict=True):
        extra = len(shape) - len(term.replace("...", ""))
        if extra < 0 or (extra and "..." not in term):
            raise ShapeError(f"einsum: {term!r} in {equation!r} does not name the {len(shape)} dims of {tuple(shape)}")
        inputs.append(term.replace("...", dots[len(dots) - extra :]))
    _check_sizes(equation, inputs, shapes)
    if arrow:
        output = right.replace("...", dots)
        strange = [c for c in output if c not in "".join(inputs) or output.count(c) > 1]
        if strange:
            raise ShapeError(f"einsum: the result in {equation!r} names {strange[0]!r} twice, or no operand has it")
        return inputs, output
    named = "".join(inputs)
    return inputs, dots + "".join(sorted(c for c in set(named) - set(dots) if named.count(c) == 1))


def _check_sizes(equation: str, inputs: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises ShapeError if a letter stands for two sizes, 1 aside."""
    sizes: dict[str, int] = {}
    for term, shape in zip(inputs, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            if sizes.setdefault(letter, n) == 1:
                sizes[letter] = n
            if n not in (1, sizes[letter]):
                raise ShapeError(f"einsum: {letter!r} in {equation!r} is both {sizes[letter]} and {n}")


@einsum.vjp("operands")
def _(xp: Namespace, g: Array, equation: str, operands: list[Array]) -> list[Array]:
    inputs, output = _parsed(equation, [x.shape for x in operands])
    return [_gradient(xp, g, inputs, output, operands, i) for i in range(len(operands))]


def _gradient(xp: Namespace, g: Array, inputs: list[str], output: str, operands: list[Array], which: int) -> Array:
    """d result / d operand `which`: the other operands and g, summed to that operand's letters.

    A letter the operand has alone was summed away: its gradient is spread over it. A letter it has twice took the
    diagonal: a unit matrix puts the gradient back there.

    Args:
        xp: the array namespace.
        g: the gradient of the result.
        inputs, output: the operands' and the result's letters.
        operands: the arrays.
        which: the index of the operand.

    Returns:
        The gradient of that operand.
    """
    terms, arrays = [output], [g]
    for i, (term, x) in enumerate(zip(inputs, operands, strict=True)):
        if i != which:
            terms.append(term)
            arrays.append(x)
    target, shape = inputs[which], operands[which].shape
    spare = iter(c for c in string.ascii_letters if c not in "".join(inputs) + output)
    wanted = ""
    for letter, n in zip(target, shape, strict=True):
        if letter in wanted:
            name = next(spare)
            terms.append(letter + name)
            arrays.append(xp.eye(n, dtype=g.dtype))
            wanted += name
        else:
            if letter not in "".join(terms):
                terms.append(letter)
                arrays.append(xp.ones(n, g.dtype))
            wanted += letter
    found = xp.einsum(_joined(terms, wanted), *arrays, optimize=True)
    whole = [m if n == 1 else n for n, m in zip(found.shape, shape, strict=True)]  # 1 may stand for any size, also none
    return xp.broadcast_to(found, whole)


einsum.samples(
    sample("ij,jk->ik", [(2, 3), (3, 4)]),
    sample("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
    sample("...ij,...jk", [(2, 1, 2, 3), (3, 3, 2)]),
    sample("i,j,k->kji", [(2,), (3,), (2,)]),
    sample("ii->i", [(3, 3)]),
    sample("iij,j", [(3, 3, 2), (2,)]),
    sample("ij->j", [(2, 3)]),
    sample("ij,ij->", [(2, 3), (2, 3)]),
    sample("ij,jk->ik", [(2, 1), (3, 4)]),
    sample("...i,...j->...ij", [(2, 0, 1), (2, 1, 3)]),
    sample("bi,oij,bj->bo", [(2, 3), (2, 3, 2), (2, 2)]),
)
einsum.errors(
    ErrorSample(sample("ij,jk->ik", [(2, 3)]), ShapeError, "names 2 operands, got 1"),
    ErrorSample(sample("ij,jk->ik", [(2, 3), (4, 2)]), ShapeError, "'j' in .* is both 3 and 4"),
    ErrorSample(sample("ij->i", [(2, 3, 4)]), ShapeError, "does not name the 3 dims"),
)
