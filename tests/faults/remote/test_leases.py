"""The lease of a run: one machine at a time has it where the store can keep them apart; elsewhere a warning."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from flame_train.config.compatibility import differences
from flame_train.config.schema import Config
from flame_train.errors import RemoteError
from flame_train.remote import faults
from flame_train.remote import lease as module
from flame_train.remote import store as of_store
from flame_train.remote.faults import Refused, Unreachable
from flame_train.remote.lease import Lease, LeaseLost
from flame_train.remote.mirror import Mirror
from flame_train.remote.restore import Copy
from flame_train.remote.store import Store


@pytest.fixture
def place(tmp_path: Path, bucket: Any) -> str:
    return f"runs/{tmp_path.name}"


@pytest.fixture
def store(place: str) -> Store:
    return Store(f"s3://{place}")


def elsewhere(bucket: Any, place: str, **changes: Any) -> None:
    """A lease of another machine, just written."""
    holder = {"holder": "other", "host": "far", "pid": 12, "began": 1.0, "machine": "another", "seconds": 60.0}
    bucket.pipe(f"{place}/lease.json", json.dumps(holder | changes).encode())


def test_a_second_machine_is_refused_while_the_lease_is_young(
    store: Store, bucket: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(bucket, place)
    with pytest.raises(Refused, match=r"far \(process 12\) trains this run, as of \d+ s ago"), Lease(store, tmp_path):
        pass
    age = {"seconds": 61}
    written = Store.modified

    def later(self: Store, name: str) -> Any:
        at = written(self, name)
        return at if at is None or "probe" not in name else at + datetime.timedelta(**age)

    monkeypatch.setattr(Store, "modified", later)
    with Lease(store, tmp_path):
        assert json.loads(bucket.cat(f"{place}/lease.json"))["pid"] == os.getpid()
    age["seconds"] = 0
    with Lease(store, tmp_path):  # the one before was given back
        assert not [path for path in bucket.find(place) if "probe" in path]


def test_a_process_that_died_here_holds_nobody_up(
    store: Store, bucket: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_machine", lambda: "this")
    alive = {"machine": "this", "pid": os.getpid(), "began": psutil.Process().create_time()}
    elsewhere(bucket, place, **alive)
    with pytest.raises(Refused), Lease(store, tmp_path):
        pass
    elsewhere(bucket, place, **alive | {"began": 1.0})  # that number was another process's then
    with Lease(store, tmp_path):
        pass


def test_a_machine_that_lost_its_lease_sends_nothing_more(
    store: Store, bucket: Any, place: str, tmp_path: Path
) -> None:
    with Lease(store, tmp_path) as lease, Mirror(store, tmp_path, 3, lease) as mirror:
        lease._version = '"stale"'  # as if the answer to a write had not come
        lease._renew()
        assert lease.lost is None
        elsewhere(bucket, place)
        lease._renew()
        assert isinstance(lease.lost, LeaseLost)
        (tmp_path / "status.json").write_text("{}")
        with pytest.raises(LeaseLost, match="far"):
            mirror.notice()
        with pytest.raises(LeaseLost, match=f"is in {tmp_path} alone"):
            mirror.finish(10)
    assert json.loads(bucket.cat(f"{place}/lease.json"))["host"] == "far"
    assert not bucket.exists(f"{place}/status.json")


def test_a_store_without_conditions_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(f"file://{tmp_path}/store")
    with Lease(store, tmp_path):
        holder = json.loads((tmp_path / "store" / "lease.json").read_text())
        (tmp_path / "store" / "lease.json").write_text(json.dumps(holder | {"machine": "another", "host": "far"}))
        with Lease(store, tmp_path):
            pass
    assert "far (process" in caplog.text
    assert "cannot keep two machines apart" in caplog.text


def test_clocks_that_disagree_are_told(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = Store.modified

    def of_another_clock(self: Store, name: str) -> Any:
        at = written(self, name)
        return at and at + datetime.timedelta(seconds=600)

    monkeypatch.setattr(Store, "modified", of_another_clock)
    with Lease(store, tmp_path):
        pass
    assert "behind the store's" in caplog.text
    with pytest.raises(RemoteError, match="bucket"):
        Store("s3://no-such-bucket/a").write("x", b"1")


WILD = ("null", "[]", '"x"', "true", "1e999", "NaN", "1" + "0" * 400, "9" * 9000, "[" * 9000, "{}")


@pytest.mark.parametrize(("kept", "value"), [*(("file", value) for value in WILD), ("s3", "null"), ("s3", WILD[6])])
def test_a_lease_may_say_anything(kept: str, value: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What is read is the same of every store; S3 is slow to answer."""
    store = request.getfixturevalue("store") if kept == "s3" else Store(f"file://{tmp_path}/store")
    machine = json.dumps(module._machine())
    told = f'{{"holder": {value}, "host": {value}, "pid": {value}, "began": {value}, "seconds": {value}'
    for said in (value, f"{told}}}", f'{told}, "machine": {machine}}}'):
        store.write("lease.json", said.encode())
        with Lease(store, tmp_path) as lease:
            assert lease.lost is None


@pytest.mark.parametrize("value", WILD[4:8])
def test_a_copy_may_say_anything(store: Store, bucket: Any, place: str, tmp_path: Path, value: str) -> None:
    folder = f"{place}/checkpoints/step-000004"
    manifest = f'{{"format": 1, "step": 4, "files": {{"a": {{"size": {value}, "sha256": {value}}}}}}}'
    status = f'{{"format": {value}, "version": {value}, "step": {value}}}'
    for name, text in {
        f"{folder}/MANIFEST.json": manifest,
        f"{place}/status.json": status,
        f"{place}/config.toml": f"[train]\nsteps = {value}\n[optimizer]\nlr = 1979-05-27\n",
        f"{place}/log.jsonl": f'{{"step": {value}, "loss": {value}}}\n{value}\n',
    }.items():
        bucket.pipe(name, text.encode())
    with contextlib.suppress(RemoteError):
        Copy(store, tmp_path / "run", lambda old: differences(old, Config()), lambda: None).restore()


def test_a_store_that_takes_requests_and_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(of_store, "_SILENT", 1)
    monkeypatch.setattr(faults, "_PATIENCE", 8.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        with pytest.raises(Unreachable, match="does not answer"), Lease(Store("s3://bucket/r"), tmp_path):
            pass
        silent.settimeout(0)
        requests = []
        with contextlib.suppress(BlockingIOError):
            while True:
                requests.append(silent.accept()[0])
        for each in requests:
            each.close()
    assert len(requests) <= 3, "each takes as long as it is waited for"
    assert "trying again" in caplog.text


def test_a_lease_is_given_back_in_no_more_time_than_is_left(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST", 0.1)
    answered, asked = threading.Event(), []

    def write_if(self: Store, name: str, content: bytes, version: str | None) -> None:
        asked.append(name)
        answered.wait(60)

    for abandoned, requests in ((False, 1), (True, 1)):
        with Lease(Store(f"{store}/{abandoned}"), tmp_path) as lease, monkeypatch.context() as hanging:
            hanging.setattr(Store, "write_if", write_if)
            if abandoned:
                lease.abandon()
            lease.__exit__()
        assert len(asked) == requests
    answered.set()


def test_a_mark_of_a_folder_is_no_file_of_it(bucket: Any, place: str) -> None:
    """As the console of AWS makes it."""
    bucket.call_s3("put_object", Bucket=place.partition("/")[0], Key=f"{place.partition('/')[2]}/d/")
    bucket.pipe(f"{place}/d/0.png", b"image")
    bucket.pipe(f"{place}/d/sub/1.png", b"image")
    assert [name for name, _ in Store(f"s3://{place}/d").walk()] == ["0.png", "sub/1.png"]
    assert [name for name, _ in Store(f"s3://{place}/d/0.png").walk()] == [""]


def test_what_a_killed_upload_left_goes_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    for name in ("config.toml.a7c04fa8.part", "config.toml", "mine.part"):
        (tmp_path / name).write_text("x")
    os.mkfifo(tmp_path / "log.jsonl")
    store.remove_partial("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "log.jsonl", "mine.part"]
    assert store.read("log.jsonl", 10) is None
