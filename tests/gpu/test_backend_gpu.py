"""The CUDA backend: memory order, threads, capture, memory accounting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16, float16, float32, float64
from flame_train.engine.mode import deterministic
from flame_train.engine.nn.loading import NonFiniteFlags
from flame_train.engine.ops.linear.skinny_gemm import side_by_side
from flame_train.engine.optim import AdamW, FlatParameters
from flame_train.engine.tensors.tensor import Parameter

pytestmark = pytest.mark.gpu


def test_put_keeps_memory_order_and_values() -> None:
    host = np.arange(120.0).reshape(2, 3, 4, 5).transpose(0, 3, 1, 2)
    moved = get_backend("cuda").to_device(host)
    assert moved.strides == host.strides
    np.testing.assert_array_equal(get_backend("cuda").to_host(moved), host)


def test_broadcast_and_reversed_views_arrive_with_their_values() -> None:
    for host in (np.broadcast_to(np.arange(3.0), (4, 3)), np.arange(6.0)[::-1], np.array(3.0)):
        np.testing.assert_array_equal(get_backend("cuda").to_host(get_backend("cuda").to_device(host)), host)


def test_large_arrays_arrive_whole_and_in_order(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (33 << 20) + 5, np.uint8)
    values.tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", np.uint8, "r")
    transposed = values[: 32 << 20].view(np.float32).reshape(2048, 4096).T
    backend = get_backend("cuda")
    for host in (mapped, values, transposed):
        moved = [backend.to_device(host) for _ in range(2)]  # the second uses the first one's buffers
        assert moved[0].strides == host.strides
        for each in moved:
            assert backend.to_host(each).tobytes() == host.tobytes()


def test_threads_get_the_results_of_one() -> None:
    def work(seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        x = flame.tensor(rng.standard_normal((64, 64)), "bfloat16", "cuda", requires_grad=True)
        w = flame.tensor(rng.standard_normal((64, 64)), "bfloat16", "cuda")
        for _ in range(10):
            F.linear(F.layer_norm(F.linear(x, w), (64,)), w).sum().backward()
        return x.grad.numpy().tobytes()

    alone = [work(s) for s in range(4)]
    together: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda s=s: together.__setitem__(s, work(s))) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [together[s] for s in range(4)] == alone


def test_work_stays_in_order_after_someone_elses_stream() -> None:
    import cupy

    x = flame.tensor(np.full((256, 256), 2.0), "float32", "cuda")
    with cupy.cuda.Stream(non_blocking=True):
        pass
    y = F.linear(x * 3.0, x).sum()
    assert cupy.cuda.get_current_stream().ptr == get_backend("cuda").stream.ptr
    assert y.item() == 256 * 256 * 256 * 12.0


def _step(state: dict[str, flame.Tensor]) -> None:
    """A small training step: two linears, attention, a norm, and an update in place."""
    x, w = state["x"], state["w"]
    w.grad = None
    h = F.layer_norm(F.linear(x, w), (64,))
    q = h.reshape(2, 16, 2, 32).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 16, 64)
    loss = F.mse_loss(F.linear(a, w).float(), x.float())
    loss.backward()
    w.data[...] = w.data - w.grad.data * 0.1
    state["loss"].data[...] = loss.data


def _fresh() -> dict[str, flame.Tensor]:
    rng = np.random.default_rng(0)
    return {
        "x": flame.tensor(rng.standard_normal((2, 16, 64)), "bfloat16", "cuda"),
        "w": flame.tensor(rng.standard_normal((64, 64)) * 0.1, "bfloat16", "cuda", requires_grad=True),
        "loss": flame.tensor(np.zeros((), np.float32), device="cuda"),
    }


def test_captured_steps_equal_eager_ones_bit_for_bit() -> None:
    eager, replayed = _fresh(), _fresh()
    captured = flame.capture(lambda: _step(replayed), "cuda")
    for _ in range(10):
        _step(eager)
        captured()
    for name in ("w", "loss"):
        assert eager[name].numpy().tobytes() == replayed[name].numpy().tobytes(), name


def test_a_replay_touches_no_memory_of_others() -> None:
    state = _fresh()
    captured = flame.capture(lambda: _step(state), "cuda")
    for _ in range(3):
        captured()
    bystanders = [flame.tensor(np.full((64, 64), float(i)), device="cuda") for i in range(200)]
    for _ in range(5):
        captured()
    for i, t in enumerate(bystanders):
        assert (t.numpy() == i).all()


def test_fills_in_a_capture_are_done_at_every_launch_and_in_their_place() -> None:
    backend = get_backend("cuda")
    xp = backend.xp
    buffers = [xp.empty(n, "uint8")[off:] for off, n in ((0, 1), (1, 4), (0, 256), (3, 4099), (0, 3_000_001))]
    seen = xp.zeros((5, 3), "int64")

    def step() -> None:
        for i, b in enumerate(buffers):
            for j, value in enumerate((0, 7)):
                b.data.memset_async(value, b.nbytes, backend.stream)
                seen[i, j] = b.sum(dtype="int64")
                b[...] = 255
            seen[i, 2] += 1

    captured = flame.capture(step, "cuda")
    for launches in range(1, 5):
        captured()
        want = [[0, 7 * b.size, launches] for b in buffers]
        np.testing.assert_array_equal(backend.to_host(seen), want)


def test_reading_back_while_capturing_is_refused_and_leaves_the_stream_usable() -> None:
    x = flame.tensor(np.ones(4), device="cuda")
    captured = flame.capture(lambda: print(x.sum().item(), end=""), "cuda")  # noqa: T201
    captured()
    with pytest.raises(RuntimeError, match="reads nothing back"):
        captured()
    assert x.sum().item() == 4.0


def test_live_bytes_return_after_a_step() -> None:
    state = _fresh()
    _step(state)
    backend = get_backend("cuda")
    backend.synchronize()
    before = backend.memory().live
    _step(state)
    assert backend.memory().live == before
    assert backend.memory().peak > before


def test_parcels_arrive_whole_and_in_order_while_the_device_works() -> None:
    backend = get_backend("cuda")
    uploader, rng = backend.uploader(), np.random.default_rng(0)
    busy = flame.tensor(rng.standard_normal((4096, 4096)), "float32", "cuda")
    sent = [
        {"a": rng.standard_normal((64, 33 + i % 2)).astype(np.float32), "n": np.asarray(i, np.int64)} for i in range(12)
    ]
    places = {i % 2: {n: backend.empty(a.shape, a.dtype) for n, a in sent[i % 2].items()} for i in range(2)}
    seen = []
    ahead: dict[int, object] = {}

    def send(i: int) -> None:
        ahead[i] = uploader.submit({n: a.copy() for n, a in sent[i].items()})

    send(0)
    for i, wanted in enumerate(sent):
        upload = ahead.pop(i)
        thread = threading.Thread(target=send, args=(i + 1,)) if i + 1 < len(sent) else None
        if thread:
            thread.start()
        for name, array in upload.wait().items():
            places[i % 2][name][...] = array
        upload.release()
        F.matmul(busy, busy)
        seen.append((wanted, {n: a.copy() for n, a in places[i % 2].items()}))
        if thread:
            thread.join()
    for wanted, got in seen:
        for name, array in wanted.items():
            np.testing.assert_array_equal(backend.to_host(got[name]), array)


@pytest.mark.parametrize("op", [F.cat, F.stack])
def test_many_small_arrays_are_joined_inside_a_graph(op: object) -> None:
    parts = [flame.tensor(np.full((2, 3), float(i)), "float32", "cuda", requires_grad=True) for i in range(21)]
    out = flame.tensor(np.zeros(()), "float32", "cuda")

    def step() -> None:
        for p in parts:
            p.grad = None
        joined = op(parts)
        (joined * joined).sum().backward()
        out.data[...] = joined.sum().data

    captured = flame.capture(step, "cuda")
    for _ in range(3):
        captured()
    assert out.item() == 6.0 * sum(range(21))


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16, float64])
@pytest.mark.parametrize("size", [1, 7, 8, 4099, 3_000_001])
def test_what_is_not_finite_is_marked_wherever_it_stands(dtype: Any, size: int) -> None:
    backend = get_backend("cuda")
    arrays = [np.ones(size, dtype) for _ in range(5)]
    for array, value, at in zip(arrays, (np.nan, np.inf, -np.inf), (0, size // 2, -1), strict=False):
        array[at] = value
    marks = NonFiniteFlags(backend, len(arrays))
    for place, array in enumerate(arrays):
        marks.check(place, backend.to_device(array))
    assert marks.places() == [0, 1, 2]


def test_what_is_not_finite_is_marked_in_any_order_of_dims() -> None:
    backend = get_backend("cuda")
    array = np.ones((3, 5, 2, 7), np.float32)
    array[2, 4, 1, 6] = np.nan
    marks = NonFiniteFlags(backend, 2)
    marks.check(1, backend.to_device(np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)))
    assert marks.places() == [1]


@pytest.mark.parametrize("rows", [600, 4096])
@pytest.mark.parametrize("working", [True, False], ids=["working copies", "leaves of 16 bits"])
def test_factors_gradients_beside_the_main_line_are_those_in_line(rows: int, working: bool) -> None:
    """Layers whose memory is taken again at once, by others of several sizes; twice a step, so that sums grow."""
    rng = np.random.default_rng(0)

    def random(*shape: int, dtype: str = "bfloat16") -> flame.Tensor:
        return flame.tensor(0.05 * rng.standard_normal(shape), dtype, "cuda")

    sizes = [(640, 1280), (1280, 320), (320, 640)] * 5
    weights = [random(after, before) for before, after in sizes]
    kind = "float32" if working else "bfloat16"
    shapes = [((16, before), (after, 16)) for before, after in sizes]
    factors = [[random(*s, dtype=kind).requires_grad_() for s in pair] for pair in shapes]
    leaves: list[Any] = [f for pair in factors for f in pair]
    if working:
        leaves = [Parameter(f.data, str(i)) for i, f in enumerate(leaves)]
        FlatParameters(leaves, compute_dtype=bfloat16)
        factors = [[down.compute_copy, up.compute_copy] for down, up in zip(leaves[::2], leaves[1::2], strict=True)]
    x = 20.0 * random(rows, 640)

    def step() -> None:
        for _ in range(2):
            y = x
            for w, (down, up) in zip(weights, factors, strict=True):
                y = F.silu(F.lora_linear(y, w, None, down, up, 1.0))
            y.sum().backward()

    def after(run: Any, times: int) -> list[bytes]:
        for f in leaves:
            f.grad.data[...] = 0
        for _ in range(times):
            run()
        return [f.grad.numpy().tobytes() for f in leaves]

    for f in (f for f in leaves if f.grad is None):
        f.grad = flame.tensor(np.zeros(f.shape, np.float32), device="cuda")
    with deterministic(True):
        replayed = flame.capture(step, "cuda")
        for _ in range(2):
            replayed()
        for times in (1, 2, 7):
            assert after(replayed, times) == after(step, times)


def test_a_gradient_comes_back_to_the_device_it_is_for() -> None:
    x = flame.tensor([1.0, 2.0], requires_grad=True)
    there = (x * 3.0).to("cuda")
    ((there * there).to("cpu") + x).sum().backward()
    assert x.grad is not None
    assert (x.grad.device, x.grad.tolist()) == ("cpu", [19.0, 37.0])


def test_gradients_side_by_side_outlive_the_copies_that_they_need() -> None:
    """Rows that do not merge are copied; what is allocated next must not take the place of the copies."""
    k = get_backend("cuda").kernels
    xp = k.xp
    gradients = [xp.asarray(np.random.default_rng(i).standard_normal((2, 8, 3))).transpose(0, 2, 1) for i in range(2)]
    rows = side_by_side(k, gradients)
    others = [xp.full((6, 8), -1.0) for _ in range(8)]
    np.testing.assert_array_equal(rows.get(), np.stack([g.get().reshape(6, 8) for g in gradients], 1))
    del others


def test_a_write_is_noticed_by_what_keeps_the_memory() -> None:
    x = flame.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    c = flame.tensor([[3.0, 4.0], [5.0, 6.0]], device="cuda")
    kept, other = (x * c[0]).sum(), (x * c[1]).sum()
    c[0].fill_(7.0)
    other.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 6.0]
    with pytest.raises(RuntimeError, match="written in place"):
        kept.backward()


def test_an_optimizers_step_is_a_write() -> None:
    p = flame.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    optimizer = AdamW([p], lr=0.1)
    z = (p * p).sum()
    (p * 2.0).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="written in place"):
        z.backward()


def test_an_upload_leaves_alone_memory_that_queued_work_still_uses() -> None:
    """What Python has freed may be read by kernels that wait for their turn; the pool gives it away all the same."""
    backend, n = get_backend("cuda"), 1 << 22
    xp, uploader = backend.xp, backend.uploader()
    long, used = xp.ones((6144, 6144), np.float32), xp.ones(n, np.float32)
    backend.synchronize()
    for _ in range(8):
        long = long @ long * 1e-4
    result = used + 1.0
    place = used.data.ptr
    del used
    sent = uploader.submit({"x": np.full(n, 7.0, np.float32)})
    assert sent.wait()["x"].data.ptr != place
    assert (backend.to_host(result) == 2.0).all()
