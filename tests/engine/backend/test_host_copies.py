"""Blocks that come from the host while others run: which copy begins when, and who waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.host_copies import HostCopies, PinnedCopy
from flame_train.engine.mode import mode, no_grad, recomputing
from flame_train.errors import DeviceFault
from flame_train.networks.block_network import Block, BlockNetwork
from flame_train.networks.block_offload import StreamedWeights
from tests.engine.backend.lines import Cuda, Line, surely_done

BLOCKS = 5


class Named:
    """An array or a part of it, known by its name alone."""

    shape, dtype = (1,), np.dtype(np.uint8)

    def __init__(self, name: str, nbytes: int = 1) -> None:
        self.data, self.nbytes = SimpleNamespace(ptr=name), nbytes

    def __getitem__(self, _: slice) -> Named:
        return self


class Row(BlockNetwork):
    """Blocks in a row."""

    def __init__(self) -> None:
        for i in range(BLOCKS):
            setattr(self, f"block{i}", Block())


class Run:
    """A pass forward and a pass backward over streamed blocks, and what was queued."""

    def __init__(self) -> None:
        self.main = Line()
        self.copies = HostCopies(Cuda(), self.main, lambda *_: None)
        network = Row()
        self.backend = SimpleNamespace(program=0, described=False)
        self.weights: Any = StreamedWeights(network, list(network.named_blocks()), self.backend)
        self.blocks = list(network.named_blocks().values())
        for block in self.blocks:
            block.checkpointing = "full"
        self.weights._kept = {i: self.copies.of(Named(f"block {i}", i + 1), None) for i in range(BLOCKS)}
        self.main.queued.clear()
        self.weights._waiting = {i: SimpleNamespace(nbytes=i + 1) for i in range(BLOCKS)}
        self.weights._buffers = [Named("a"), Named("b")]
        self.weights._holds, self.weights._arrivals = [None] * 2, [None] * 2

    def forward(self) -> None:
        with no_grad():
            for i in range(BLOCKS):
                self.weights.ready(self.blocks[i])
                self.main.queued.append(f"forward {i}")

    def backward(self, down_to: int = 0) -> None:
        with recomputing(mode()):
            for i in reversed(range(down_to, BLOCKS)):
                self.weights.ready(self.blocks[i])
                self.main.queued.append(f"backward {i}")

    def done_before(self, line: Line, what: str) -> set[str]:
        return surely_done([self.main, self.copies._stream], line, what)

    def copies_of(self) -> list[str]:
        return [item for item in self.copies._stream.queued if isinstance(item, str)]


@pytest.fixture
def run() -> Run:
    return Run()


def copy(number: int) -> str:
    return f"copy host {number + 1} to {'ab'[number % 2]}"


def test_a_block_runs_after_its_copy_and_the_copy_begins_after_the_last_block_in_its_buffer(run: Run) -> None:
    run.forward()
    for i in range(BLOCKS):
        assert copy(i) in run.done_before(run.main, f"forward {i}")
        if i >= 2:
            assert f"forward {i - 2}" in run.done_before(run.copies._stream, copy(i))


def test_a_copy_runs_beside_the_block_before_it(run: Run) -> None:
    run.forward()
    for i in range(1, BLOCKS):
        assert f"forward {i - 1}" not in run.done_before(run.copies._stream, copy(i))
        assert copy(i) not in run.done_before(run.main, f"forward {i - 1}")


def test_the_way_back_begins_with_what_is_there_and_copies_the_rest_once(run: Run) -> None:
    run.forward()
    begun = len(run.copies_of())
    assert run.copies_of() == [copy(i) for i in range(BLOCKS)]
    run.backward()
    assert run.copies_of()[begun:] == [copy(i) for i in (2, 1, 0)]
    for i in (2, 1, 0):
        assert f"backward {i + 2}" in run.done_before(run.copies._stream, copy(i))
        assert f"backward {i + 1}" not in run.done_before(run.copies._stream, copy(i))
        assert copy(i) in run.done_before(run.main, f"backward {i}")


def test_all_copies_are_joined_at_the_end_even_where_no_gradient_is_wanted_early(run: Run) -> None:
    """The blocks before the first adapted one are not run again, although the copy of the nearest was begun."""
    run.forward()
    run.backward(down_to=2)
    run.copies.join()
    run.main.queued.append("end")
    assert set(run.copies_of()) <= run.done_before(run.main, "end")
    queued = len(run.main.queued)
    run.copies.join()
    assert len(run.main.queued) == queued, "nothing is left to join, which outside a capture would be an error in one"


def test_another_program_knows_nothing_of_what_the_buffers_hold(run: Run) -> None:
    run.forward()
    run.backend.program += 1
    run.backward()
    assert run.copies_of()[BLOCKS:] == [copy(i) for i in (4, 3, 2, 1, 0)]


def test_memory_that_is_kept_counts_while_it_lives(run: Run) -> None:
    assert run.copies.kept_bytes == sum(range(1, BLOCKS + 1))
    run.weights._kept.clear()
    assert run.copies.kept_bytes == 0


def test_refused_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, size: int) -> Any:
        raise OSError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(Cuda, "PinnedMemory", refuse)
    copies = HostCopies(Cuda(), Line(), lambda *_: None)
    with pytest.raises(DeviceFault, match="the system refused 3 MiB of pinned host memory"):
        copies.of(Named("large", 3 << 20), None)


@pytest.mark.parametrize("keep", [False, True])
def test_a_copy_comes_back_into_a_new_array_and_into_one_that_is_there(gpu: Any, keep: bool) -> None:
    host = np.arange(24, dtype=np.uint8)
    there = gpu.to_device(host)
    held = gpu.offload(there, keep=keep)
    assert isinstance(held, PinnedCopy)
    assert gpu.host_bytes == (24 if keep else 0)
    there[...] = 0
    np.testing.assert_array_equal(np.asarray(held.reload()), host)
    arrived = held.fetch(there)
    arrived()
    np.testing.assert_array_equal(np.asarray(there), host)


def test_memory_that_processes_share_is_pinned_while_a_copy_lies_there(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, runtime = dict[int, int](), gpu.xp.cuda.runtime
    monkeypatch.setattr(runtime, "hostRegister", lambda begin, size, flags: pinned.update({begin: size}))
    monkeypatch.setattr(runtime, "hostUnregister", pinned.pop)
    host, memory = np.arange(24, dtype=np.uint8), np.zeros(24, np.uint8)
    written = gpu.keep_in(memory, gpu.to_device(host))
    np.testing.assert_array_equal(memory, host)
    memory[3] = 99
    found, out = gpu.keep_in(memory, None), gpu.to_device(host)
    found.fetch(out)()
    np.testing.assert_array_equal(np.asarray(out), memory)
    assert gpu.host_bytes == 48
    assert pinned == {memory.ctypes.data: 24}
    del written, found
    assert not pinned
    assert gpu.host_bytes == 0

    def refuse(begin: int, size: int, flags: int) -> None:
        raise OSError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(runtime, "hostRegister", refuse)
    with pytest.raises(DeviceFault, match="the system refused 0 MiB of pinned host memory"):
        gpu.keep_in(memory, None)
