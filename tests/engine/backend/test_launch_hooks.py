"""Launches are told to who watches, and are left out where that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.tools.bench.timing import breakdown, count_launches, kind_of


@pytest.fixture
def step(gpu: Any) -> Callable[[], None]:
    """Rows, a product, something elementwise and attention."""
    x, w, q = (flame.tensor(np.ones(s), "bfloat16", "cuda") for s in ((4, 16), (8, 16), (1, 2, 16, 8)))

    def run() -> None:
        F.silu(F.layer_norm(F.linear(x, w), (8,)))
        F.scaled_dot_product_attention(q, q, q)

    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "matrix products"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1", "matrix products"),
        ("paired_product", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("Memset (Device)", "copies and fills"),
        ("cupy_copy__bfloat16_float32", "CuPy's own"),
        ("void cub::DeviceReduceKernel<float>", "CuPy's own"),
        ("rows", "norms and other rows"),
        ("philox_words", ""),
    ],
)
def test_a_profiler_s_names_are_of_the_same_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def ran(gpu: Any) -> Counter[str]:
    """How often each kind of kernel was run so far."""
    calls: Counter[str] = Counter()
    for (_, kernel), function in gpu.kernels._modules._generated.items():
        calls[kind_of(kernel)] += function._function.calls
    return calls


def test_every_launch_is_told_and_left_out_where_it_is_not_wanted(gpu: Any, step: Callable[[], None]) -> None:
    step()
    once, told = ran(gpu), Counter[str]()
    assert once["norms and other rows"] == once["elementwise"] == 1

    def watch(name: str, args: Any) -> bool:
        told[name] += 1
        return name != "rows"

    with gpu.kernels.launch_hooks.hooked(watch):
        step()
    assert told["rows"] == told["elementwise"] == 1
    assert ran(gpu) == Counter({"norms and other rows": 1, "elementwise": 2})
    step()
    assert told["rows"] == 1
    assert ran(gpu) == Counter({"norms and other rows": 2, "elementwise": 3})


def test_a_kernel_is_looked_up_once_and_keeps_the_most_shared_memory_it_was_allowed(gpu: Any) -> None:
    modules, float32 = gpu.kernels._modules, np.dtype(np.float32)
    found = [modules.get("ops/norm/group_norm.cu", "group_norm", float32, kib << 10) for kib in (16, 100, 60)]
    assert len(set(found)) == 1
    assert found[0]._function.max_dynamic_shared_size_bytes == 100 << 10
    assert modules.get("ops/norm/group_norm.cu", "group_norm", np.dtype(np.float16)) is not found[0]


def test_a_kinds_time_is_that_of_its_kernels_alone(gpu: Any, step: Callable[[], None]) -> None:
    """Each kernel taking a millisecond: a step is captured after one eager run, so that both run every kernel once."""

    def twice() -> None:
        step()
        step()

    counted, before = count_launches(twice, gpu), ran(gpu)

    def milliseconds(replay: Any) -> float:
        nonlocal before
        since, before = ran(gpu) - before, ran(gpu)
        return since.total() / 2.0

    rows = breakdown(twice, gpu, counted, {"elementwise": 6e3}, (2e6, 1e12), milliseconds)
    found = {row["kind"]: row for row in rows}
    assert {kind: row["ms"] for kind, row in found.items()} == {
        "norms and other rows": 2.0,
        "elementwise": 2.0,
        "the rest": 0.0,
    }
    assert found["norms and other rows"]["launches"] == 2
    assert found["elementwise"]["floor_ms"] == 3.0


def test_a_census_counts_launches_and_bytes_once_each(gpu: Any) -> None:
    x = flame.tensor(np.ones((4, 16)), "float32", "cuda")
    y = flame.tensor(np.ones((1, 16)), "float32", "cuda")
    found = count_launches(lambda: F.mul(x, y), gpu)
    assert found["elementwise"] == (1, 4 * (64 + 16 + 64))
    assert sum(launches for launches, _ in found.values()) == 1
