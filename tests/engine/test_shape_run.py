"""A step on shapes: what it adds up is what the arithmetic of a small step says, and it leaves nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.cuda.libraries.cublaslt import _WORKSPACE_BYTES as WORKSPACE
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import H100, RTX_3090, Gpu, gpu_of, shape_run
from flame_train.errors import EnvironmentFault


def zeros(*shape: int, dtype: Any = np.float32) -> flame.Tensor:
    return flame.tensor(np.zeros(shape, dtype), device="cuda")


def has_gpu() -> bool:
    try:
        return get_backend("cuda").name == "cuda"
    except EnvironmentFault:
        return False


# ---- what it counts -------------------------------------------------------------------------------------


def test_the_peak_is_what_the_graph_keeps_and_what_passes_by() -> None:
    """y = relu(x a) b: forward keeps x, h and relu's slope; at most two gradients pass by."""
    m, k, n = 512, 1024, 2048
    with shape_run() as run:
        empty = run.live_bytes
        x, a, b = zeros(m, k), zeros(k, n), zeros(n, k)
        for t in (a, b):
            t.requires_grad_()
        begun = run.live_bytes
        assert begun - empty == 4 * (m * k + 2 * k * n)
        y = F.relu(x @ a) @ b
        held = run.live_bytes - begun
        y.backward(zeros(m, k))
    results, gradients = 4 * (m * n + m * k), 4 * 2 * k * n
    assert results + WORKSPACE <= held <= results + WORKSPACE + 4 * m * n
    assert run.peak_bytes - begun >= WORKSPACE + results + gradients
    assert run.live_bytes - begun >= gradients


def test_products_count_two_for_each_multiply_add() -> None:
    m, k, n = 512, 256, 128
    with shape_run() as run:
        x, w = zeros(m, k), zeros(n, k).requires_grad_()
        made: list[flame.Tensor] = []
        assert run.multiplied(lambda: made.append(F.linear(x, w))) == {"matrix products": 2 * m * k * n}
        assert run.multiplied(lambda: made[0].sum().backward()) == {"matrix products": 2 * m * k * n}
    assert run.flops.again == {}


def test_what_is_multiplied_again_is_told_apart() -> None:
    m, k = 512, 256
    with shape_run() as run:
        x, w = zeros(m, k).requires_grad_(), zeros(k, k).requires_grad_()
        y = flame.checkpoint(lambda t: F.linear(F.silu(F.linear(t, w)), w), x)
        y.sum().backward()
    assert run.flops.once == {"matrix products": 2 * m * k * k * 6}
    assert run.flops.again == {"matrix products": 2 * m * k * k * 2}


def test_checkpointing_keeps_less_and_offloading_least() -> None:
    def peak(wrap: Any) -> int:
        with shape_run() as run:
            w = [zeros(1024, 1024) for _ in range(8)]
            x = zeros(4096, 1024).requires_grad_()
            for weight in w:
                x = wrap(lambda t, weight=weight: F.silu(F.silu(F.linear(t, weight))), x)
            x.sum().backward()
            return run.peak_bytes

    whole = peak(lambda fn, x: fn(x))
    less = peak(flame.checkpoint)
    least = peak(lambda fn, x: flame.checkpoint(fn, x, offload=True))
    assert least < less < whole


@pytest.mark.parametrize("exact", [True, False])
def test_attention_in_a_fixed_order_writes_its_scores_down(exact: bool) -> None:
    """cuDNN's for heads of 128: of half the heads at a time where they are many, as on an H100."""
    heads, length, size = 24, 4608, 128
    with shape_run() as run, deterministic(exact):
        q, k, v = (zeros(1, heads, length, size).to("bfloat16").requires_grad_() for _ in range(3))
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        room = run.backend.kernels.workspace.buffer
    assert (0 if room is None else room.nbytes) == exact * 2 * 13 * length**2


def test_a_captured_step_takes_one_block_and_a_fiftieth() -> None:
    with shape_run() as run:
        x = zeros(4096, 1024).requires_grad_()
        w = zeros(1024, 1024)
        begun = run.live_bytes

        def step() -> None:
            F.silu(F.linear(x, w)).sum().backward()
            x.grad = None

        step()  # the workspace for products is taken
        run.backend.reset_peak()
        captured = flame.capture(step, "cuda")
        captured()
        once = run.peak_bytes - begun - WORKSPACE
        captured()
        assert run.backend.graph_pool.total_bytes() == pytest.approx(once * 1.02, rel=1e-3)
        for _ in range(3):
            captured()
        assert run.peak_bytes == begun + WORKSPACE + run.backend.graph_pool.total_bytes()


# ---- GPUs -----------------------------------------------------------------------------------------------


def test_other_gpus_choose_other_kernels() -> None:
    def chosen(gpu: Gpu) -> str:
        with shape_run(gpu):
            q = zeros(1, 20, 1024, 64).to("bfloat16")
            return next(i for i, why in flame.explain(F.scaled_dot_product_attention, q, q, q) if why == "chosen")

    assert (chosen(H100), chosen(RTX_3090)) == ("wgmma", "cudnn")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_an_image_without_a_batch_is_explained_as_a_batch_of_one(layout: str) -> None:
    with shape_run():
        image, weight = zeros(16, 32, 32), zeros(16, 16, 3, 3)
        if layout == "NHWC":
            image = image.permute(1, 2, 0)
        found = [
            (F.conv2d, (weight,), {"layout": layout, "padding": 1}),
            (F.avg_pool2d, (2,), {"layout": layout}),
            (F.adaptive_avg_pool2d, (2,), {"layout": layout}),
        ]
        for op, args, kwargs in found:
            for ask in (flame.explain, flame.explain_gradients):
                assert ask(op, image, *args, **kwargs) == ask(op, image.unsqueeze(0), *args, **kwargs)
        assert dict(flame.explain(F.conv2d, image, weight, layout=layout))["cudnn"] == "chosen"
        assert flame.explain(F.max_pool2d, image, 2, layout=layout) == [("body", "chosen")]


@pytest.mark.parametrize("gpu", [H100, RTX_3090], ids=["H100", "RTX 3090"])
@pytest.mark.parametrize(
    "storage", [None, nn.Storage("fp8"), nn.Storage("fp8", dynamic=True), nn.Storage("int8", dynamic=True)]
)
def test_weights_take_what_loading_them_takes(gpu: Gpu, storage: nn.Storage | None) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            self.wide = nn.Linear(512, 1024, bias=False)
            self.image = nn.Conv2d(16, 32, 3)

        def quantizable(self, rotated: bool = False) -> Any:
            return {self.wide: True}

    with shape_run(gpu) as run:
        begun, layers = run.live_bytes, Layers()
        nn.allocate(layers, dtype="bf16", device="cuda", storage=storage)
        wide = 2 * 512 * 1024 if storage is None else 512 * 1024 + 4 * 1024
        assert run.live_bytes - begun == wide + 2 * 16 * 32 * 9 + 512  # as memory is given out: a bias takes 512
        assert layers.image.weight.data.transpose(0, 2, 3, 1).flags.c_contiguous


def test_without_a_gpu_an_h100_is_described() -> None:
    assert gpu_of("cpu") == H100
    if not has_gpu():
        assert gpu_of("cuda") == H100


# ---- it leaves nothing behind ---------------------------------------------------------------------------


def test_outside_nothing_has_changed() -> None:
    before = has_gpu()

    def broken() -> None:
        with shape_run():
            assert has_gpu()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert has_gpu() == before


def test_another_thread_does_not_see_it() -> None:
    before, seen = has_gpu(), list[Any]()
    with shape_run() as run:
        thread = threading.Thread(target=lambda: seen.append(get_backend("cuda") if has_gpu() else None))
        thread.start()
        thread.join()
    assert seen[0] is not run.backend
    assert (seen[0] is not None) == before


def test_one_inside_another_counts_for_itself() -> None:
    with shape_run() as outer:
        x = zeros(256, 256)
        taken = outer.live_bytes
        with shape_run() as inner:
            zeros(256, 256)
            assert inner.live_bytes <= inner.peak_bytes
        assert get_backend("cuda") is x.backend
        assert outer.live_bytes == taken


def test_what_is_read_back_is_zeros_and_nothing_while_a_step_is_captured() -> None:
    with shape_run():
        x = zeros(3) + 1.0
        assert x.tolist() == [0.0, 0.0, 0.0]
        step = flame.capture(lambda: x.numpy(), "cuda")
        step()
        with pytest.raises(RuntimeError, match="reads nothing back"):
            step()
