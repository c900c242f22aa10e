"""Tensors of dims that an op is not for: it computes with them, or says in its own words what it expected."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import flame_train
import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Op
from flame_train.engine.op_samples import materialise
from flame_train.errors import ShapeError
from tests.engine.misshapen import misshapen

OURS = str(Path(flame_train.__file__).parent)
FOREIGN = ("axis", "gufunc", "operand", "array is", "cannot reshape", "tuple index", "out of bounds", "out of range")
"""What NumPy and Python say."""
BY_INDEX = {"getitem"}
"""Brackets: NumPy's own words for an index that is not there, which PyTorch's resemble."""


def complaint(op: Op, given: dict[str, Any]) -> Exception | None:
    try:
        op(**given)
    except (ValueError, TypeError, IndexError) as e:
        return e
    return None


@pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - BY_INDEX))
def test_another_shape_is_computed_with_or_told(name: str) -> None:
    op = REGISTRY[name]
    for what, given in misshapen(op, materialise(op, next(iter(op.iter_samples())), generator(name, 0))):
        if e := complaint(op, given):
            where = traceback.extract_tb(e.__traceback__)[-1].filename
            assert where.startswith(OURS), f"{what}: {e}"
            assert not any(words in str(e) for words in FOREIGN), f"{what}: {e}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: F.normalize(x, dim=9), "normalize, in norm: dim 9 is outside a tensor of 2 dims"),
        (lambda x: F.softmin(x, dim=9), "softmin, in softmax: dim 9 is outside a tensor of 2 dims"),
        (lambda x: F.norm(x, dim=9), "norm: dim 9 is outside a tensor of 2 dims"),
        (lambda x: F.conv1d(x.reshape(1, 2, 3), x.reshape(1, 3, 2)), "conv1d, in conv2d: input (1, 2, 1, 3) (NCHW)"),
    ],
)
def test_an_op_made_of_others_names_itself_first(call: Any, words: str) -> None:
    with pytest.raises(ShapeError) as raised:
        call(flame.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert str(raised.value).startswith(words)
