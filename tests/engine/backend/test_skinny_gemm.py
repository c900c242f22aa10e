"""The gradients of LoRA factors in one launch: what is asked of the kernel, how the work is cut, what it is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.ops.linear import skinny_gemm
from flame_train.engine.ops.linear.skinny_gemm import SkinnyOperands, both, cut, fit


def thin(
    gpu: Any, rows: int = 1024, width: int = 640, out: int = 1280, layers: int = 3, rank: int = 16
) -> SkinnyOperands:
    empty = gpu.kernels.empty
    shapes = (rows, width), (rows, layers, out), (rows, layers * rank), (rows, layers * rank)
    return SkinnyOperands(*(empty(shape, bfloat16) for shape in shapes), rank)


def test_what_the_kernel_is_told(gpu: Any, launched: Any) -> None:
    t = thin(gpu)
    held = gpu.kernels.empty(t.shape("up"), float32)
    made = both(gpu.kernels, t, {"down": None, "up": held}, deferrable=False)
    assert [x.shape for x in (*made["down"], *made["up"])] == [(16, 640)] * 3 + [(1280, 16)] * 3
    grid, threads, args, shared = launched.by_name["lora_gradients"]
    assert (grid, threads) == ((5 + 30, 2), 160)
    assert args[:4] == (
        ((1024, 48), (64, 16)),
        ((1, 1024, 640), (64, 64)),
        ((1024, 48), (64, 16)),
        ((3, 1024, 1280), (64, 64)),
    )
    down, up = (args[i].view(skinny_gemm._SIDE).item() for i in (4, 5))
    assert down[1:] == (0, 640, 1, 0)  # nothing was held of the downs, so they are assigned
    assert up == (held.data.ptr, 1280 * 16, 1280, 3, 1)
    assert args[6:] == (1024, 512)
    assert shared <= 227 << 10


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("out", "width"), [(640, 640), (1280, 1280), (3072, 3072), (21504, 3072)])
def test_a_launch_takes_a_third_of_the_card_or_a_little_more(layers: int, out: int, width: int) -> None:
    wide, share = cut(layers, out, width, 132)
    blocks = share * (-(-width // (64 * wide)) + layers * -(-out // (64 * wide)))
    assert 3 * blocks >= 132
    assert share == 1 or 3 * blocks < 2 * 132  # half as many would be too few


@pytest.mark.parametrize(
    "what", [{"rows": 500}, {"rank": 8}, {"rank": 32}, {"width": 644}, {"out": 1284}], ids=lambda what: str(what)
)
def test_what_is_left_to_the_library(gpu: Any, what: dict[str, int]) -> None:
    assert fit(gpu.kernels, thin(gpu))
    assert not fit(gpu.kernels, thin(gpu, **what))


def test_the_kernels_structs_are_what_is_passed(same_layout: Any) -> None:
    text = skinny_gemm._text(bfloat16, 3, 1, 4, 1, 4)
    same_layout(text, {"Side": skinny_gemm._SIDE, "TensorMap": tensor_map.STRUCT})
    assert np.dtype(skinny_gemm._SIDE).itemsize == 32
