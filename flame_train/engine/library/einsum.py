"""Products of tensors by a formula of letters, of batches of matrices, and of all pairs."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ShapeError
from ..autograd.grad_target import GradTargets
from ..backend.cuda.launcher import Launcher
from ..dtype import Array
from ..namespace import Namespace
from ..op import ErrorSample, composite, primitive, sample
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.linear.matmul import matmul
from ..tensors.tensor import Tensor


@primitive(torch="einsum", accepts_integers=True)
def einsum(xp: Namespace, equation: str, operands: Sequence[Array]) -> Array:
    """The sum over the dims that the equation names on the left only: "bij,bjk->bik" is a matrix product"""
    inputs, output = _parsed(equation, [x.shape for x in operands])
    return xp.einsum(_joined(inputs, output), *operands, optimize=True)


def _joined(inputs: Sequence[str], output: str) -> str:
    return f"{','.join(inputs)}->{output}"


def _parsed(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """Returns the letters of each operand and of the result, with "..." spelled out as letters, and "->" filled in."""
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
    whole = [m if n == 1 else n for n, m in zip(found.shape, shape, strict=True)]  # size 1 broadcasts, to 0 too
    return xp.broadcast_to(found, whole)


@dataclass(frozen=True, slots=True)
class _Product:
    """Two operands' letters by what becomes of them: those of a batch, of one operand alone, and those summed over."""

    batch: str
    left: str
    summed: str
    right: str

    @classmethod
    def of(cls, first: str, second: str, output: str) -> _Product | None:
        """That of `output` from two operands; None if theirs is no matrix product."""
        shared, named = set(first) & set(second), (first, second, output)
        if any(len(set(t)) != len(t) for t in named) or not set(first) ^ set(second) <= set(output):
            return None
        kept = shared & set(output)
        parts = ((first, kept), (first, set(first) - shared), (first, shared - kept), (second, set(second) - shared))
        return cls(*("".join(c for c in term if c in letters) for term, letters in parts))

    def made(self, k: Launcher, first: Array, second: Array, terms: tuple[str, str, str]) -> Array:
        """Returns the result: `terms` are the letters of both operands and its own."""
        sizes = dict(zip(terms[0] + terms[1], (*first.shape, *second.shape), strict=True))
        a = _arranged(k, first, terms[0], (self.batch, self.left, self.summed))
        b = _arranged(k, second, terms[1], (self.batch, self.summed, self.right))
        found = self.batch + self.left + self.right
        y = k.matmul(a, b).reshape([sizes[c] for c in found])
        return y.transpose([found.index(c) for c in terms[2]])


def _arranged(k: Launcher, x: Array, term: str, groups: Sequence[str]) -> Array:
    """`x`, whose dims are called `term`, with a dim for each of `groups`: a view where its strides allow that."""
    moved = x.transpose([term.index(c) for c in "".join(groups)])
    sizes = [math.prod(x.shape[term.index(c)] for c in group) for group in groups]
    ends = [sum(map(len, groups[: i + 1])) for i in range(len(groups))]
    within = (i for i in range(moved.ndim - 1) if i + 1 not in ends)
    merges = all(
        1 in moved.shape[i : i + 2] or moved.strides[i] == moved.shape[i + 1] * moved.strides[i + 1] for i in within
    )
    return (moved if merges else k.contiguous(moved)).reshape(sizes)


def _no_product(equation: str, operands: Sequence[Array]) -> str:
    """Says why a call is not one matrix product; "" if it is."""
    if len(operands) != 2:
        return "not two operands"
    if reason := same(AT_MOST_FP32, *operands):
        return reason
    inputs, output = _parsed(equation, [x.shape for x in operands])
    product = _Product.of(inputs[0], inputs[1], output)
    if product is None or not (product.left and product.summed and product.right):
        return "no matrix product"
    sizes = dict(zip(inputs[0], operands[0].shape, strict=True))
    if any(sizes.get(c, n) != n for c, n in zip(inputs[1], operands[1].shape, strict=True)):
        return "a dim of 1 that stands for another size"
    return "" if operands[0].size and operands[1].size else "nothing to multiply"


@einsum.cuda("product", when=_no_product)
def _(k: Launcher, equation: str, operands: list[Array]) -> Array:
    (first, second), output = _parsed(equation, [x.shape for x in operands])
    product = _Product.of(first, second, output)
    assert product is not None
    return product.made(k, operands[0], operands[1], (first, second, output))


@einsum.cuda_vjp("product", "operands", when=_no_product, accumulates=False)
def _(k: Launcher, g: Array, equation: str, operands: list[Array], targets: GradTargets) -> list[Array | None]:
    inputs, output = _parsed(equation, [x.shape for x in operands])
    made: list[Array | None] = [None, None]
    for i in targets["operands"]:
        other, term = operands[1 - i], inputs[1 - i]
        product = _Product.of(output, term, inputs[i])
        assert product is not None
        made[i] = product.made(k, g, other, (output, term, inputs[i]))
    return made


einsum.perf_samples(
    sample("bhqd,bhkd->bhqk", [(2, 3, 70, 16), (2, 3, 40, 16)]),
    sample("bqhd,bkhd->bhqk", [(2, 40, 3, 16), (2, 70, 3, 16)]),
    sample("...ij,oj->...oi", [(3, 2, 40, 24), (48, 24)]),
    sample("bijc,ijcd->db", [(3, 4, 5, 8), (4, 5, 8, 16)]),
)

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


@composite(torch="bmm")
def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """input @ mat2 for batches of matrices, (B, n, m) and (B, m, p)"""
    if input.ndim != 3 or mat2.ndim != 3 or input.shape[0] != mat2.shape[0]:
        raise ShapeError(f"bmm: expected (B, n, m) and (B, m, p), got {input.shape} and {mat2.shape}")
    return matmul(input, mat2)


bmm.samples(sample((2, 3, 4), (2, 4, 5)), sample((0, 3, 4), (0, 4, 5)))

bmm.errors(
    ErrorSample(sample((2, 3, 4), (4, 5)), ShapeError, r"expected \(B, n, m\) and \(B, m, p\)"),
    ErrorSample(sample((2, 3, 4), (2, 3, 5)), ShapeError, "inner sizes 4 and 3 differ"),
)


@composite(torch="outer")
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """input[i] * vec2[j] as a matrix"""
    if input.ndim != 1 or vec2.ndim != 1:
        raise ShapeError(f"outer: expected two vectors, got {input.shape} and {vec2.shape}")
    return input.unsqueeze(1) * vec2


outer.samples(sample((3,), (4,)))

outer.errors(ErrorSample(sample((3,), (1, 4)), ShapeError, "expected two vectors"))
