"""Locks on open files, by `fcntl` and by a stand-in for `msvcrt`: they must forbid the same."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flame_train.disk import system
from flame_train.disk.system import lock

Open = Callable[..., int]


class Msvcrt:
    """`msvcrt.locking` of one process: exclusive ranges of a file's bytes, each an open file's."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self._taken: list[tuple[int, range]] = []

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK
        begin = os.lseek(descriptor, 0, os.SEEK_CUR)
        assert begin + count < 1 << 31, "the C library has 31 bits for it"
        for owner, taken in self._taken:
            if owner != descriptor and begin < taken.stop and taken.start < begin + count:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._taken.append((descriptor, range(begin, begin + count)))

    def forget(self, descriptor: int) -> None:
        """As the system does when a descriptor is closed."""
        self._taken = [(owner, taken) for owner, taken in self._taken if owner != descriptor]


@pytest.fixture(params=["fcntl", "msvcrt"])
def close(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Either system, and how a descriptor is closed on it."""
    if request.param == "fcntl":
        return os.close
    msvcrt = Msvcrt()
    monkeypatch.setattr(system, "_FCNTL", None)
    monkeypatch.setattr(system, "_MSVCRT", msvcrt)

    def closed(descriptor: int) -> None:
        msvcrt.forget(descriptor)
        os.close(descriptor)

    return closed


@pytest.fixture
def opened(tmp_path: Path, close: Callable[[int], None]) -> Iterator[Open]:
    """opened(flags): the same file once more."""
    (tmp_path / "file").write_bytes(b"content")
    found: list[int] = []

    def another(flags: int = os.O_RDWR) -> int:
        found.append(os.open(tmp_path / "file", flags))
        return found[-1]

    yield another
    for descriptor in found:
        with contextlib.suppress(OSError):  # a test has closed it
            close(descriptor)


def test_an_exclusive_lock_forbids_every_other(opened: Open) -> None:
    lock(opened())
    for shared in (False, True):
        with pytest.raises(BlockingIOError):
            lock(opened(), shared=shared)


def test_shared_locks_stand_together_and_forbid_an_exclusive_one(opened: Open) -> None:
    for _ in range(5):
        lock(opened(os.O_RDONLY), shared=True)
    with pytest.raises(BlockingIOError):
        lock(opened())


def test_a_lock_goes_with_its_descriptor(opened: Open, close: Callable[[int], None]) -> None:
    first = opened()
    lock(first)
    close(first)
    lock(opened())


def test_a_lock_moves_no_position_and_changes_no_byte(opened: Open, tmp_path: Path) -> None:
    descriptor = opened()
    os.lseek(descriptor, 3, os.SEEK_SET)
    lock(descriptor)
    assert os.read(descriptor, 9) == b"tent"
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_disk_without_locks_is_told_from_a_lock_that_is_taken(monkeypatch: pytest.MonkeyPatch, opened: Open) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EINVAL, "no locks here")

    monkeypatch.setattr(system, "_FCNTL", None)
    monkeypatch.setattr(system, "_MSVCRT", SimpleNamespace(LK_NBLCK=2, locking=refuse))
    with pytest.raises(OSError, match="no locks here") as caught:
        lock(opened())
    assert not isinstance(caught.value, BlockingIOError)


def test_a_system_without_either_has_no_locks(monkeypatch: pytest.MonkeyPatch, opened: Open) -> None:
    monkeypatch.setattr(system, "_FCNTL", None)
    monkeypatch.setattr(system, "_MSVCRT", None)
    with pytest.raises(OSError, match="no locks on files") as caught:
        lock(opened())
    assert not isinstance(caught.value, BlockingIOError)
