"""The lease of a run: one machine at a time has it where the store can keep them apart; elsewhere a warning."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from flame_train.errors import RemoteError
from flame_train.remote import lease as module
from flame_train.remote.faults import Refused
from flame_train.remote.lease import Lease, LeaseLost
from flame_train.remote.mirror import Mirror
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
