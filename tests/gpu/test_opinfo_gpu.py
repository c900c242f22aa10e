"""PyTorch's own samples on the GPU, in fp32, bf16 and fp16, with gradients, for every op that bears PyTorch's name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from flame_train.engine.dtype import bfloat16, float16, float32
from tests.parity.test_opinfo import check_narrow, held, named

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "theirs"), list(named()), ids=lambda v: str(v))
def test_samples(name: str, theirs: str, dtype: Any) -> None:
    held(name, theirs, partial(check_narrow, dtype=dtype, device="cuda"))
