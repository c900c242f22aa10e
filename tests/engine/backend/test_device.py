"""What the CUDA backend does around kernels, over the stand-in: copies, captures, arrays sent ahead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import backend as backends
from flame_train.engine.backend import cuda
from flame_train.engine.mode import capturing
from flame_train.errors import EnvironmentFault


def test_copies_keep_values_and_memory_order(gpu: Any) -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    for host in (x, x.transpose(2, 0, 1), x[:, ::2], np.float64(3.0) * np.ones(())):
        there = gpu.to_device(host)
        np.testing.assert_array_equal(gpu.to_host(there), host)
        np.testing.assert_array_equal(gpu.get_async(there)(), host)
    assert gpu.to_device(x.transpose(2, 0, 1)).strides == x.transpose(2, 0, 1).strides
    assert gpu.to_device(x[:, ::2]).flags.c_contiguous
    target = gpu.empty((2, 3), x.dtype)
    gpu.write(target, x[:, :, 0].T.copy().T)
    np.testing.assert_array_equal(gpu.to_host(target), x[:, :, 0])


def test_tensors_on_two_devices_do_not_meet(gpu: Any) -> None:
    there = flame.tensor([1.0, 2.0], device="cuda")
    assert there.device == "cuda"
    assert there.to("cpu").tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="input on cuda, other on cpu"):
        there + flame.tensor([1.0, 2.0])


def test_a_gradient_comes_back_to_the_device_it_is_for(gpu: Any) -> None:
    x = flame.tensor([1.0, 2.0], requires_grad=True)
    there = (x * 3.0).to("cuda")
    assert there.device == "cuda"
    seen = []
    there.register_hook(lambda g: seen.append(g.device))
    (there.to("cpu") * flame.tensor([5.0, 7.0]) + x).sum().backward()
    assert x.grad is not None
    assert (x.grad.device, x.grad.tolist(), seen) == ("cpu", [16.0, 22.0], ["cuda"])
    with flame.no_grad():
        assert not x.to("cuda").requires_grad


def test_what_is_written_lies_on_the_same_device(gpu: Any) -> None:
    there = flame.tensor([1.0, 2.0, 3.0], device="cuda")
    with pytest.raises(RuntimeError, match=r"copy_: expected a tensor on cuda, got one on cpu; move it with \.to"):
        there.copy_(flame.tensor([1.0, 2.0, 3.0]))
    there[1:] = np.array([5.0, 6.0])
    there[0] = 4
    assert there.to("cpu").tolist() == [4.0, 5.0, 6.0]


def test_memory_counts_what_graphs_keep(gpu: Any) -> None:
    found = gpu.memory()
    assert (found.live, found.peak, found.total) == (7, 7, 9)
    gpu.reset_peak()
    assert gpu.memory().peak == 7


def test_the_peak_has_what_graphs_keep_beside_what_comes_and_goes(gpu: Any) -> None:
    gpu.memory()
    gpu._pool.used_bytes = lambda: 10
    gpu._malloc(1)
    gpu._pool.used_bytes = lambda: 3
    assert (gpu.memory().live, gpu.memory().peak) == (3 + 4, 10 + 4)


def test_a_step_runs_once_is_captured_once_and_then_replayed(gpu: Any) -> None:
    ran = []
    step = gpu.capture(lambda: ran.append(gpu.stream.capturing))
    step()
    assert ran == [False]
    for _ in range(3):
        step()
    assert ran == [False, True]
    assert step._graph.launches == 3
    assert not gpu.stream.capturing


def graph_pool(**parts: Any) -> Any:
    """A pool of its own with nothing in it."""
    empty = {"total_bytes": lambda: 0, "used_bytes": lambda: 0, "malloc": lambda size: None}
    return SimpleNamespace(**{**empty, "free_all_blocks": lambda: None, **parts})


@pytest.mark.parametrize("kept", [0, 4])
def test_the_first_capture_gets_what_its_eager_run_took_as_one_block(gpu: Any, kept: int) -> None:
    asked: list[int] = []
    gpu.graph_pool = graph_pool(total_bytes=lambda: kept, malloc=asked.append)
    gpu._pool = SimpleNamespace(used_bytes=lambda: used[0], malloc=lambda size: None, free_all_blocks=lambda: None)
    used = [300]

    def fn() -> None:
        for used[0] in (1000, 10_300, 300):
            gpu._malloc(1)

    step = gpu.capture(fn)
    step()
    assert asked == []
    step()
    assert asked == ([] if kept else [10_200])  # 10 000 and a fiftieth
    assert gpu.memory().peak == 10_300 + kept


def test_graphs_memory_is_given_back_with_the_last_of_them(gpu: Any) -> None:
    freed = list[bool]()
    gpu.graph_pool = graph_pool(free_all_blocks=lambda: freed.append(True))
    steps = [gpu.capture(lambda: None) for _ in range(2)]
    for step in steps:
        step()
        step()
    freed.clear()
    gpu.empty_cache()
    steps.pop()
    gpu.empty_cache()
    assert not freed  # a graph works there still
    steps.pop()
    del step
    gpu.empty_cache()
    assert freed == [True]


def test_a_capture_takes_its_block_for_the_stream_that_it_records(gpu: Any) -> None:
    entered = list[str]()
    gpu.graph_pool = graph_pool(malloc=lambda size: entered.append("block"))
    step = gpu.capture(lambda: None)
    step()
    gpu.enter_thread = lambda: entered.append("stream")
    step()
    assert entered[:2] == ["stream", "block"]


def test_a_capture_that_found_no_room_is_tried_once_more_without_the_others(gpu: Any) -> None:
    others = gpu.capture(lambda: None)
    for _ in range(2):
        others()
    room = iter([True, False, True])

    def fn() -> None:
        if not next(room):
            raise MemoryError

    step = gpu.capture(fn)
    step()
    step()
    assert (others._graph, step._graph.launches) == (None, 1)

    def never() -> None:
        if gpu.stream.capturing:
            raise MemoryError

    refused = gpu.capture(never)
    refused()
    with pytest.raises(MemoryError):
        refused()


def test_a_capture_without_room_for_one_block_grows_in_pieces(gpu: Any) -> None:
    def full(size: int) -> None:
        raise MemoryError

    ran: list[int] = []
    gpu.graph_pool = graph_pool(malloc=full)
    step = gpu.capture(lambda: ran.append(1))
    for _ in range(3):
        step()
    assert len(ran) == 2


class Card:
    """Two pools of one card's memory: what a pool has freed stays its own until it is told to give it back."""

    def __init__(self, gpu: Any, room: int) -> None:
        self.room = room
        gpu._pool, gpu.graph_pool = self.pool(), self.pool()

    def pool(self) -> Any:
        kept = {"free": 0, "used": 0}

        def malloc(size: int) -> None:
            fresh = max(0, size - kept["free"])
            if fresh > self.room:
                raise MemoryError
            self.room -= fresh
            kept["free"] += fresh - size
            kept["used"] += size

        def free_all_blocks() -> None:
            self.room += kept["free"]
            kept["free"] = 0

        return SimpleNamespace(
            kept=kept,
            malloc=malloc,
            free_all_blocks=free_all_blocks,
            used_bytes=lambda: kept["used"],
            total_bytes=lambda: sum(kept.values()),
        )


@pytest.mark.parametrize(("one", "other"), [("_pool", "graph_pool"), ("graph_pool", "_pool")])
def test_memory_that_one_pool_keeps_unused_is_there_for_the_other(gpu: Any, one: str, other: str) -> None:
    card = Card(gpu, 100)
    getattr(gpu, one).kept["free"], card.room = 60, 40
    {"_pool": gpu._malloc, "graph_pool": gpu._graph_malloc}[other](90)
    assert getattr(gpu, other).used_bytes() == 90
    assert gpu.memory().live == 90


def test_what_a_graph_works_in_is_not_given_back(gpu: Any) -> None:
    card = Card(gpu, 100)
    step = gpu.capture(lambda: None)
    step()
    step()
    gpu.graph_pool.kept["free"], card.room = 60, 40
    with pytest.raises(MemoryError):
        gpu._malloc(90)
    assert gpu.graph_pool.total_bytes() == 60


def test_nothing_is_given_back_while_a_step_is_captured(gpu: Any) -> None:
    card = Card(gpu, 100)
    gpu._pool.kept["free"], card.room = 60, 40
    step = gpu.capture(lambda: gpu.stream.capturing and gpu._graph_malloc(90))
    step()
    asked = list[bool]()
    gpu.free_unused = lambda: asked.append(gpu.stream.capturing)
    with pytest.raises(MemoryError):
        step()
    assert not any(asked)


class Bytes:
    """A pool that counts what is taken of it, as long as `using` has it chosen."""

    def __init__(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0
        gpu.graph_pool = graph_pool(used_bytes=lambda: self.used, malloc=self.malloc)
        monkeypatch.setattr(gpu.xp.cuda, "using_allocator", self.using)
        self._chosen: Any = gpu._malloc

    def malloc(self, size: int) -> None:
        self.used += size

    @contextmanager
    def using(self, malloc: Any) -> Iterator[None]:
        before, self._chosen = self._chosen, malloc
        yield
        self._chosen = before

    def take(self, size: int) -> None:
        self._chosen(size)


def test_another_steps_first_run_works_where_graphs_do(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, seen = Bytes(gpu, monkeypatch), list[int]()

    def step() -> None:
        memory.take(1000)
        seen.append(memory.used)
        memory.used = 0

    first, second = gpu.capture(step), gpu.capture(step)
    for _ in range(3):
        first()
    for _ in range(3):
        second()
    first()
    assert seen == [0, 1000, 1000, 1000], "the very first alone takes the other pool's"


def test_graphs_are_recorded_anew_around_what_outlives_a_steps_first_run(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, ran = Bytes(gpu, monkeypatch), list[str]()

    def later() -> None:
        if "later" not in ran:
            memory.take(512)  # a table, and kept
        ran.append("later")

    first, second = gpu.capture(lambda: ran.append("first")), gpu.capture(later)
    for step in (first, first, first, second, first, first, second, second, first):
        step()
    assert ran == ["first", "first", "later", "first", "later"], "once more after the table was made"


def test_room_for_workspaces_may_outlive_it(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, ran = Bytes(gpu, monkeypatch), list[str]()

    def later() -> None:
        if gpu.kernels.workspace.buffer is None:
            memory.take(4096)
            gpu.kernels.workspace.buffer = SimpleNamespace(
                data=SimpleNamespace(mem=SimpleNamespace(size=4096)), nbytes=4000
            )

    first = gpu.capture(lambda: ran.append("first"))
    for step in (first, first, gpu.capture(later), first):
        step()
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        (lambda gpu, x: x.numpy(), "reads nothing back .* move this read out of the step"),
        (lambda gpu, x: gpu.get_async(x.data), "reads nothing back"),
        (lambda gpu, x: flame.tensor([2.0], device="cuda"), "copies nothing in .* make this tensor before the step"),
        (lambda gpu, x: gpu.write(x.data, np.zeros(1)), "copies nothing in .* write before the step"),
        (lambda gpu, x: gpu.synchronize(), "waits for nothing"),
    ],
)
def test_a_captured_step_is_device_work_alone(gpu: Any, wrong: Any, instead: str) -> None:
    x = flame.tensor([1.0], device="cuda")
    step = gpu.capture(lambda: wrong(gpu, x))
    step()
    with pytest.raises(RuntimeError, match=f"a captured step {instead}"):
        step()
    assert not gpu.stream.capturing
    assert x.item() in (0.0, 1.0)


def test_a_parcel_is_awaited_before_it_is_read_and_before_it_is_filled_again(gpu: Any) -> None:
    uploader, sent = gpu.uploader(), []
    for n in range(4):
        upload = uploader.submit({"a": np.full(3, n), "b": np.full((2, 2), -n)})
        found = upload.wait()
        assert gpu.stream.waits[-1] is upload._arrived
        np.testing.assert_array_equal(gpu.to_host(found["a"]), np.full(3, n))
        np.testing.assert_array_equal(gpu.to_host(found["b"]), np.full((2, 2), -n))
        assert upload._released.awaited == 1 + n // 2
        upload.release()
        assert upload._released.recorded == 1 + n // 2
        sent.append(upload)
    assert sent[0] is sent[2]
    assert sent[1] is sent[3]
    assert sent[0] is not sent[1]
    assert uploader.submit({"a": np.zeros(4)}) not in sent


def test_no_upload_gets_memory_that_the_streams_pool_gives_away(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in the queue may still read what Python has freed, and an upload's own stream does not wait for them."""
    pools = list[Any]()

    @contextmanager
    def using(malloc: Any) -> Iterator[None]:
        malloc(512)
        yield

    monkeypatch.setattr(gpu.xp.cuda, "using_allocator", using)
    monkeypatch.setattr(gpu.xp.cuda, "MemoryPool", lambda allocator: object())  # the stand-in's are all one
    monkeypatch.setattr(type(gpu), "_taken", lambda self, pool, size: pools.append(pool))
    for _ in range(2):
        uploader = gpu.uploader()
        for n in range(3):
            uploader.submit({"a": np.full(n + 1, 1.0)}).release()
    assert len(pools) == 6
    assert all(pool is not gpu._pool and pool is not gpu.graph_pool for pool in pools)
    assert pools[0] is pools[2]
    assert pools[0] is not pools[3], "another uploader's memory may still be read, too"


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda, "_STATE", {})
    with pytest.raises(EnvironmentFault, match="pip install 'flame-train"):
        backends.get_backend("cuda")


@pytest.mark.parametrize(("count", "match"), [(0, "no NVIDIA GPU is visible"), (OSError("driver"), "no usable NVIDIA")])
def test_without_a_gpu_the_error_says_so(gpu: Any, monkeypatch: pytest.MonkeyPatch, count: Any, match: str) -> None:
    def devices() -> int:
        if isinstance(count, OSError):
            raise count
        return count

    monkeypatch.undo()
    cupy = gpu.xp
    cupy.cuda.runtime.getDeviceCount = devices
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "_STATE", {})
    with pytest.raises(EnvironmentFault, match=match):
        backends.get_backend("cuda")


@pytest.mark.parametrize("count", [1, 2, 8, 9, 20, 70])
def test_many_arrays_are_joined_by_eights_which_a_graph_can_hold(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    sizes, whole = [], gpu.references._xp.concatenate

    def watched(arrays: Any, **options: Any) -> Any:
        sizes.append(len(arrays))
        return whole(arrays, **options)

    monkeypatch.setattr(gpu.references._xp, "concatenate", watched)
    parts = [gpu.to_device(np.full((2, 1 + i % 3), i)) for i in range(count)]
    joined = gpu.to_host(gpu.references.concatenate(parts, axis=1))
    np.testing.assert_array_equal(joined, np.concatenate([gpu.to_host(p) for p in parts], axis=1))
    squares = [gpu.to_device(np.full((2, 2), i)) for i in range(count)]
    np.testing.assert_array_equal(gpu.to_host(gpu.references.stack(squares, axis=-1))[0, 0], np.arange(count))
    assert max(sizes) <= 8


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_parked_on_the_host_comes_back_as_often_as_asked(gpu: Any, captured: bool) -> None:
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    there = gpu.to_device(host)
    with capturing() if captured else nullcontext():
        back = gpu.offload(there)
        there[...] = 0
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(back.reload()), host)
