"""Several processes and `output.remote`: the leading one alone brings, sends and has the lease; all end alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from .conftest import Study
from .test_ranks import processes_of, saved, wait_for

NO_ROOM = """
from flame_train.remote.faults import Full
from flame_train.remote.store import Store
upload = Store.upload
def without_room(self, name, *rest):
    if "step-000008" in name:
        raise Full("the store is full")
    return upload(self, name, *rest)
Store.upload = without_room
"""
"""A store whose disk has room for the first checkpoint only."""

COUNTED = """
import os
from flame_train.remote import lease, restore
from flame_train.remote.store import Store
rank = os.environ["OMPI_COMM_WORLD_RANK"]
began = Store.__init__
def begin(self, address):
    print(f"rank {rank} opens the store", flush=True)
    began(self, address)
Store.__init__ = begin
bring = restore.Copy._bring_checkpoint
def brought(self, held, manifest):
    print(f"rank {rank} brings step {manifest.step}", flush=True)
    bring(self, held, manifest)
restore.Copy._bring_checkpoint = brought
"""
"""Each process says what it has to do with the store."""


def in_store(store: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in store.glob("checkpoints/step-*/MANIFEST.json"))


def rank_of(process: int) -> int:
    return int(psutil.Process(process).environ()["OMPI_COMM_WORLD_RANK"])


@pytest.mark.proof
def test_all_go_on_from_what_the_leading_process_brings_once(study):
    runs: Study = study("sdxl")
    store, out = runs.folder / "store", runs.folder / "carried"
    constant = {"schedule__name": "constant", "schedule__warmup_steps": 0, "output__remote": f"file://{store}"}
    whole = runs.finish("stayed", 2, train__steps=8, **constant | {"output__remote": ""})
    runs.finish("carried", 2, train__steps=4, **constant)
    assert in_store(store) == [4]
    shutil.rmtree(out)
    code, said = runs.scripted("carried", 2, COUNTED, train__steps=8, **constant)
    assert code == 0, said
    assert said.count("opens the store") == said.count("rank 0 opens the store") == 1
    assert said.count("brings step") == said.count("rank 0 brings step 4") == 1
    carried = runs.lora("carried")
    assert all((whole[name] == carried[name]).all() for name in whole)
    assert in_store(store) == [4, 8]
    kept = ("lora.safetensors", "log.jsonl", "status.json")
    assert all((store / name).read_bytes() == (out / name).read_bytes() for name in kept)


def test_a_signal_to_one_process_saves_sends_and_ends_all(study):
    runs: Study = study("sdxl").cold()
    store = runs.folder / "store-of-signalled"
    process = runs.start(
        "signalled-remote", 2, train__steps=400, checkpoint__every=100_000, output__remote=f"file://{store}"
    )
    log = runs.folder / "signalled-remote" / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0, process)
    ranks = {rank_of(pid): pid for pid in processes_of(process.pid)}
    assert json.loads((store / "lease.json").read_text())["pid"] == ranks[0]
    os.kill(ranks[1], signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "saved; run the same command to continue" in said
    assert "MPI_ABORT" not in said
    assert saved(runs.folder / "signalled-remote")
    assert len(in_store(store)) == 1
    status = (store / "status.json").read_bytes()
    assert status == (runs.folder / "signalled-remote" / "status.json").read_bytes()


@pytest.mark.proof
@pytest.mark.parametrize("stopped", [False, True])
def test_what_the_store_lacks_at_the_end_is_the_error_of_all(study, stopped):
    runs: Study = study("sdxl")
    name = f"lacking-{stopped}"
    store = runs.folder / f"store-of-{name}"
    signalled = """
from flame_train.training import loop
import os, signal
push = loop._Figures.push
def pushed(self, launched):
    push(self, launched)
    if launched.step == 7 and rank == "1":
        os.kill(os.getpid(), signal.SIGTERM)
loop._Figures.push = pushed
"""
    script = 'import os\nrank = os.environ["OMPI_COMM_WORLD_RANK"]\n' + NO_ROOM + signalled * stopped
    script += 'import sys\nsys.argv += ["--remote-wait", "1"]\n'
    steps = 40 if stopped else 8
    code, said = runs.scripted(name, 2, script, train__steps=steps, output__remote=f"file://{store}")
    assert code == 8, said
    assert said.count("error: ") == 1, said
    assert "the store is full" in said
    assert "nothing is lost here: start the same command again" in said
    assert "MPI_ABORT" not in said
    assert in_store(store) == [4]
    assert sorted(int(path.name[5:]) for path in (runs.folder / name / "checkpoints").glob("step-*"))[:2] == [4, 8]


def test_a_store_that_refuses_is_told_once(study):
    runs: Study = study("sdxl")
    (runs.folder / "another").mkdir()
    (runs.folder / "another" / "config.toml").write_text("a file of another program")
    code, said = runs.run("refused-remote", 2, output__remote=f"file://{runs.folder / 'another'}")
    assert code == 8, said
    assert said.count("expected nothing or the copy of a run") == 1
    assert "MPI_ABORT" not in said
    assert not (runs.folder / "refused-remote").exists()
