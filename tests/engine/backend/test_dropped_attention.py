"""Attention with dropout on tensor cores, run as C++ without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.backend.cuda import nvrtc
from flame_train.engine.dtype import DType, bfloat16, float16
from flame_train.engine.ops.attention import masks
from flame_train.engine.random import least_kept, uniform_of
from tests.engine.backend.dropped import Case, check, check_what_falls

ENGINE = Path(nvrtc.__file__).parents[2]


@pytest.fixture
def running(computing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are written out; what is generated, a mask of numbers, is made by NumPy."""

    def added(k: Any, mask: Any, query: Any, key: Any, multiple: int) -> Any:
        seen = mask.get()
        numbers = np.where(seen, 0.0, -np.inf) if seen.dtype == bool else seen
        numbers = numbers.reshape((1,) * (4 - numbers.ndim) + numbers.shape)
        room = np.full((*numbers.shape[:3], -(-numbers.shape[3] // multiple) * multiple), np.nan)
        room[..., : numbers.shape[3]] = numbers
        return flame.tensor(room, query.dtype, "cuda").data[..., : numbers.shape[3]]

    monkeypatch.setattr(masks, "added", added)


CASES = [
    Case((2, 2, 2, 150, 131), causal=True),
    Case((2, 2, 1, 40, 77), mask="keys"),
    Case((2, 4, 2, 33, 70), mask="pairs", causal=True),
    Case((1, 2, 2, 131, 40), mask="added", scale=0.3),
    Case((2, 1, 1, 5, 90), mask="added to keys"),
    Case((1, 3, 1, 70, 50), (128, 128), causal=True),
    Case((2, 2, 2, 65, 97), (80, 104), "pairs"),
    Case((3, 2, 1, 40, 150), mask="lengths"),
    Case((1, 2, 2, 1, 2), (40, 64)),
    Case((1, 1, 1, 20, 30), (64, 8), p=0.9),
]


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(running: None, case: Case, dtype: DType) -> None:
    check(case, dtype)


MISSING = {
    "the tile has come": "    copies_wait<0>();\n",
    "the tile before has been read": "    __syncthreads();  // the tile has come, and the one before has been read\n",
}


@pytest.mark.proof
@pytest.mark.parametrize("kernel", ["forward", "of_queries", "of_keys"])
@pytest.mark.parametrize("part", MISSING.values(), ids=MISSING)
def test_what_is_not_waited_for_shows(
    running: None, computing: Any, written_out: Any, part: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in would not see such a mistake if it copied at once."""

    def get(file: str, *asked: Any) -> Any:
        text = nvrtc.included((ENGINE / file).read_text())
        begin = text.find(f"__device__ __forceinline__ void {kernel}(const Problem& p)")
        if begin >= 0:
            assert part in text[begin:]
            text = text[:begin] + text[begin:].replace(part, "", 1)
        return written_out.get(text, *asked)

    monkeypatch.setattr(computing.kernels._modules, "get", get)
    with pytest.raises(AssertionError):
        check(Case((1, 1, 1, 150, 200)), bfloat16)


@pytest.mark.proof
@pytest.mark.parametrize("sizes", [(2, 4, 2, 70, 64), (1, 2, 1, 20, 51)], ids=str)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5])
def test_the_same_probabilities_fall(running: None, sizes: Any, head: int, p: float) -> None:
    check_what_falls(Case(sizes, (head, head), p=p), bfloat16)


@pytest.mark.parametrize("p", [1e-9, 2.0**-24, 3 * 2.0**-24, 0.1, 0.3, 0.5, 0.9, 1 - 2.0**-24])
def test_the_least_word_that_is_kept(p: float) -> None:
    least = least_kept(p)
    around = np.clip(least + np.arange(-513, 513), 0, 2**32 - 1).astype(np.uint32)
    np.testing.assert_array_equal(uniform_of(around) >= np.float32(p), around >= least)


def test_no_word_is_kept_where_all_is_dropped() -> None:
    assert least_kept(1.0) == 2**32
    assert uniform_of(np.array([2**32 - 1], np.uint32)) < 1
