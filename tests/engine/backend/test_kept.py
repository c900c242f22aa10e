"""What the graph keeps where kernels have a say in it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.memory_report import saved_by_op
from flame_train.networks.attention_mlp import attend


@pytest.mark.parametrize(
    ("keys", "dtype", "images"),
    [
        (77, ml_dtypes.bfloat16, 1),  # queries; what they find is made again
        (256, ml_dtypes.bfloat16, 2),  # the gradients of many keys keep it
        (77, np.float32, 2),  # as ours do, and merging the heads copies it for a moment only
    ],
)
def test_what_attention_found_is_kept_for_its_own_gradients_alone(
    gpu: Any, keys: int, dtype: Any, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flame_train.networks.attention_mlp.remade", flame.rematerialize)  # however small
    size = np.dtype(dtype).itemsize
    length, width, rank, heads = 512, 128, 4, 2

    def fresh(*shape: int, trained: bool = True) -> flame.Tensor:
        return flame.tensor(np.zeros(shape, dtype), device="cuda", requires_grad=trained)

    q, k, v = (fresh(1, n, width) * 2.0 for n in (length, keys, keys))
    weight = fresh(width, width, trained=False)
    out = F.lora_linear(attend(q, k, v, heads), weight, None, fresh(rank, width), fresh(width, rank), 1.0)
    kept = sum(saved_by_op(out).values()) - weight.data.nbytes - 4 * heads * length  # the rows' log-sum-exp, in fp32
    assert kept == size * (images * length * width + 2 * keys * width + length * rank)
    out.sum().backward()
