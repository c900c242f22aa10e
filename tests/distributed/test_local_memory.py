"""What processes of one machine keep in host memory: once for all, as the kernel counts it; refusals and faults."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from flame_train.distributed import local_memory
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.distributed.local_memory import copies_kept, keeping_once
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.kept_arrays import KeptArrays
from flame_train.engine.mode import mode
from flame_train.errors import DataError, OtherRankFailed
from flame_train.io.safetensors import SafetensorsFile, save_file

from .conftest import Study

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has anonymous files")


class Threads:
    """Threads in the place of processes."""

    captured = False

    def __init__(self, world: int) -> None:
        self._meeting, self._said = threading.Barrier(world, timeout=20), dict[int, bytes]()
        self.groups = [ProcessGroup(rank, world, _Thread(self, rank)) for rank in range(world)]

    def all_gather(self, rank: int, data: bytes) -> list[bytes]:
        self._said[rank] = data
        self._meeting.wait()
        gathered = [self._said[each] for each in sorted(self._said)]
        self._meeting.wait()
        return gathered

    def each(self, work: Callable[[ProcessGroup], Any]) -> list[Any]:
        """What `work` returned or raised in each."""

        def outcome(group: ProcessGroup) -> Any:
            try:
                return work(group)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(outcome, self.groups))


class _Thread:
    captured = False

    def __init__(self, all_of_them: Threads, rank: int) -> None:
        self.all, self.rank = all_of_them, rank

    def all_gather(self, data: bytes) -> list[bytes]:
        return self.all.all_gather(self.rank, data)


def kept(context: AbstractContextManager[object], values: list[int]) -> tuple[int, list[np.ndarray]]:
    """The pages of the file that all have open, and the arrays as they come back; each writes its own alone."""
    backend = get_backend("cpu")
    with context:
        arrays, shared = KeptArrays(backend), mode().shared
        for number, value in enumerate(values):
            own = arrays.is_own(number)
            arrays.add(number, np.full(5000, value if own else 0, np.uint8))
        arrays.complete()
        pages = -1 if shared is None else os.fstat(shared._file.descriptor).st_blocks * 512 // 4096
    found = [np.zeros(5000, np.uint8) for _ in values]
    for number, out in enumerate(found):
        arrays[number].fetch(out)()
    return pages, found


def test_each_writes_its_own_and_all_read_all() -> None:
    for pages, found in Threads(3).each(lambda group: kept(keeping_once(group), [7, 8, 9, 10])):
        assert [set(array.tolist()) for array in found] == [{7}, {8}, {9}, {10}]
        assert pages == 2 * 4 + 1 + 3  # two each, the mark, and what each says


def test_who_does_not_take_part_waits_for_nobody() -> None:
    def work(group: ProcessGroup) -> Any:
        context = keeping_once(group, takes_part=group.rank != 1)
        return None if group.rank == 1 else kept(context, [1, 2])[0]

    assert Threads(3).each(work) == [7, None, 7]


def test_machines_share_nothing_and_one_process_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = threading.local()
    monkeypatch.setattr(local_memory, "_host", lambda: hosts.name)

    def work(group: ProcessGroup) -> Any:
        hosts.name = "ab"[group.rank // 2]
        return copies_kept(group), *kept(keeping_once(group), [1, 2])

    for copies, pages, found in Threads(3).each(work):
        assert copies == 1
        assert pages in (7, -1)
        assert [set(array.tolist()) for array in found] == [{1}, {2}]
    assert (copies, pages) == (1, -1)
    assert copies_kept(ALONE) == 1
    assert kept(keeping_once(ALONE), [1])[0] == -1


def test_those_that_cannot_map_it_keep_their_own_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/proc/1/fd/none"
    monkeypatch.setattr(local_memory._File, "address", [path, "0" * 32])
    for copies, (pages, _) in Threads(2).each(lambda group: (copies_kept(group), kept(keeping_once(group), [1, 2]))):
        assert (copies, pages) == (2, -1)
    (said,) = {record.message for record in caplog.records}
    assert "each process keeps its own copy of the weights that wait in host memory" in said
    assert path in said


def test_an_error_before_all_is_written_reaches_the_others() -> None:
    def work(group: ProcessGroup) -> Any:
        context = keeping_once(group)
        with group.barrier(), context:
            if group.rank == 1:
                raise DataError("no such block\n" * 200)
            KeptArrays(get_backend("cpu")).complete()

    first, second = Threads(2).each(work)
    assert isinstance(first, OtherRankFailed)
    assert first.code == DataError.exit_code
    assert str(first).startswith("rank 1 failed: no such block")
    assert isinstance(second, DataError)


COUNTING = """
import glob, json, os
from flame_train.engine.backend import get_backend
from flame_train.run.train import train_run
whole = train_run.train
def train(run):
    files = {os.stat(f).st_ino: os.stat(f).st_blocks * 512 for f in glob.glob("/proc/self/fd/*")
             if os.path.lexists(f) and os.readlink(f).startswith("/memfd:flame-train")}
    with open(os.path.join(run.output.dir, f"kept-{run.session.group.rank}.json"), "w") as out:
        json.dump([files, get_backend("cpu").host_bytes], out)
    return whole(run)
train_run.train = train
"""


def test_streamed_weights_of_two_processes_are_there_once_and_train_to_the_same_bytes(study) -> None:
    """Base, text encoders and the model that samples; the file's pages are the kernel's count."""
    runs: Study = study("flux")
    streamed = {"model__offload": 1.0, "sample__model": str(runs.base), "sample__every": 2, "sample__steps": 1}
    settings = {"train__steps": 2, "sample__prompts": ("a wave", "two waves")}
    resident = runs.finish("resident", 2, **settings)
    cold = {"data__cache": str(runs.folder / "streamed-cache")}
    code, said = runs.scripted("streamed", 2, COUNTING, **settings, **streamed, **cold)
    assert code == 0, said
    found = [json.loads((runs.folder / "streamed" / f"kept-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    files, kept_bytes = found[0]
    assert len(files) == 2  # of the base, and of the model that samples
    assert kept_bytes > 100_000
    assert kept_bytes < sum(files.values()) < 1.3 * kept_bytes  # each array begins a page
    lora = runs.lora("streamed")
    assert all((lora[name] == resident[name]).all() for name in resident)


def test_a_tensor_that_one_process_reads_and_is_broken_ends_all(study) -> None:
    runs: Study = study("flux")
    with SafetensorsFile(runs.base) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    broken = next(name for name in tensors if "double_blocks.1" in name and name.endswith("weight"))
    tensors[broken].reshape(-1)[0] = np.nan
    base = runs.base.with_name("broken.safetensors")
    save_file(base, tensors)
    code, said = runs.run("broken", 2, model__checkpoint=str(base), model__offload=1.0)
    assert code == 3, said
    assert "NaN or infinity" in said
    assert "double_blocks.1" in said
