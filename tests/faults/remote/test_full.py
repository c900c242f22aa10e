"""A store whose disk is full: the run goes on, says so, ends with 8, and sends the rest once there is room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileOpener

from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import RemoteError
from flame_train.io.commit import commit
from flame_train.remote.faults import Full
from flame_train.remote.lease import Lease
from flame_train.remote.mirror import Mirror
from flame_train.remote.store import Store

ROOMY = 1 << 30
FULL = "the store is full (No space left on device); free some space there"


@dataclass(frozen=True)
class Small:
    """A store on a disk whose room a test sets."""

    disk: Any
    address: str
    environment: dict[str, str]

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.disk.folder)) for path in self.disk.folder.rglob("*"))


@pytest.fixture
def sftp(servers: Any, tmp_path: Path) -> Iterator[Small]:
    disk = servers.Disk(tmp_path / "there", ROOMY)
    disk.folder.mkdir()
    (tmp_path / "server").mkdir()
    with servers.small_sftp(tmp_path / "server", disk) as server:
        yield Small(disk, server.address(disk.folder / "run"), server.environment())


@pytest.fixture
def local(servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """A disk of this machine, by fsspec's own class of its files."""
    disk = servers.Disk(tmp_path / "there", ROOMY)
    disk.folder.mkdir()
    opened, written = LocalFileOpener._open, LocalFileOpener.write

    def noticed(self: Any) -> None:
        opened(self)
        if "w" in self.mode:
            disk.opened.append(self.f)

    def write(self: Any, data: bytes) -> Any:
        self.f.flush()
        if len(data) > disk.left():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(self, data)

    monkeypatch.setattr(LocalFileOpener, "_open", noticed)
    monkeypatch.setattr(LocalFileOpener, "write", write)
    return Small(disk, f"file://{disk.folder}/run", {})


@pytest.fixture(params=["sftp", "local"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Small:
    made: Small = request.getfixturevalue(request.param)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def train(job: Any, sftp: Small, wait: int) -> Any:
    arguments = job.arguments("sdxl-lora", output__remote=sftp.address)
    return job.program(*arguments, "--remote-wait", str(wait), env=sftp.environment)


def test_a_run_goes_on_without_room_there_ends_with_8_and_the_next_start_sends_the_rest(
    job: Any, undisturbed: Any, sftp: Small
) -> None:
    sftp.disk.room = 45_000  # for the log and reports, and not for a checkpoint
    ended = train(job, sftp, 3)
    assert ended.code == 8, ended.stderr
    assert FULL in ended.complaint
    assert "nothing is lost here: start the same command again" in ended.complaint
    assert ended.stderr.count("the run goes on, and what is missing there is sent later") == 1
    assert job.result() == undisturbed.result
    assert not [name for name in sftp.names() if name.endswith(".part")]
    sftp.disk.room = ROOMY
    again = train(job, sftp, 60)
    assert again.code == 0, again.stderr
    here = [path.relative_to(job.out) for path in job.out.rglob("*") if path.is_file() and path.name != ".lock"]
    assert all((sftp.disk.folder / "run" / path).read_bytes() == (job.out / path).read_bytes() for path in here)


def test_a_start_on_a_full_store_is_refused_before_anything_is_written(job: Any, sftp: Small) -> None:
    sftp.disk.room = 0
    ended = train(job, sftp, 3)
    assert ended.code == 8
    assert FULL in ended.complaint
    assert len(ended.complaint.strip().splitlines()) == 1
    assert not job.out.exists()


def test_what_found_no_room_takes_none(small: Small, tmp_path: Path) -> None:
    """The part that came is removed and closed: a file that is open keeps its room."""
    store = Store(small.address)
    store.write("kept", b"1" * 1000)
    small.disk.room = 100_000
    left = small.disk.left()
    (tmp_path / "large").write_bytes(b"2" * 3_000_000)
    for _ in range(3):
        with (tmp_path / "large").open("rb") as file, pytest.raises(Full, match="the store is full") as caught:
            store.upload("large", file)
        assert small.disk.left() == left, caught
    assert small.names() == ["run", "run/kept"]


def test_a_checkpoint_that_fits_no_more_leaves_its_room_to_the_next(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder, 1, 100_000)
    store = Store(small.address)
    with Lease(store, folder) as lease, Mirror(store, folder, 1, lease) as mirror:
        mirror.checkpoint(1)
        mirror.finish(60)
    small.disk.room -= small.disk.left() - 90_000
    save(folder, 2, 100_000)  # half of it fits, and would leave no room for the next
    with Lease(store, folder) as lease, Mirror(store, folder, 1, lease) as mirror:
        mirror.checkpoint(2)
        with pytest.raises(RemoteError, match="the store is full"):
            mirror.finish(1)
    assert manifests(small) == [1]
    save(folder, 3, 30_000)
    with Lease(store, folder) as lease, Mirror(store, folder, 1, lease) as mirror:
        mirror.checkpoint(3)
        mirror.finish(60)
    assert manifests(small) == [3]


def manifests(small: Small) -> list[int]:
    """The steps of the checkpoints there that have one."""
    return [int(name.split("/")[-2][-6:]) for name in small.names() if name.endswith("MANIFEST.json")]


def save(folder: Path, step: int, size: int) -> None:
    """A checkpoint of two files, the smaller one first, and no other beside it."""
    files = {"small": b"1" * (size // 2), "large": b"2" * size}
    with OpenFolder.open(folder) as opened:
        commit(opened / "checkpoints", step, files, 1, 2 * size)
