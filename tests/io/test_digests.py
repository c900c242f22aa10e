"""Digests are kept for files that nobody touched, and for no others."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.io import digests as module
from flame_train.io.digests import Digests


def later() -> int:
    """A clock that has gone on since the test's files were made."""
    return time.time_ns() + 10_000_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"first")
    return path


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., tuple[str, int]]:
    """The digest of a file as a new start finds it, and how many files were read for it."""

    def ask(*files: Path, what: str = "content", now: Callable[[], int] = later) -> tuple[str, int]:
        read: list[Path] = []

        def make() -> str:
            read.extend(files)
            return hashlib.sha256(b"|".join(f.read_bytes() for f in files)).hexdigest()

        with Digests(tmp_path / "kept", now) as digests:
            return digests.of(files, what, make), len(read)

    return ask


def content(*parts: bytes) -> str:
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def test_a_new_start_reads_no_file_that_is_known(file: Path, asked: Callable[..., tuple[str, int]]) -> None:
    assert asked(file) == (content(b"first"), 1)
    assert asked(file) == (content(b"first"), 0)
    assert asked(file, what="something else") == (content(b"first"), 1)


def test_new_content_under_its_old_modification_time_is_noticed(
    file: Path, asked: Callable[..., tuple[str, int]]
) -> None:
    asked(file)
    before = file.stat()
    with file.open("r+b") as opened:  # the same inode, the same size
        opened.write(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (before.st_size, before.st_ino, before.st_mtime_ns)
    assert asked(file) == (content(b"other"), 1)


def test_another_file_in_its_place_is_noticed(file: Path, asked: Callable[..., tuple[str, int]]) -> None:
    asked(file)
    other = file.with_name("b.bin")
    other.write_bytes(b"other")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    os.replace(other, file)
    assert asked(file) == (content(b"other"), 1)


def test_of_several_files_each_counts(file: Path, asked: Callable[..., tuple[str, int]]) -> None:
    second = file.with_name("b.bin")
    second.write_bytes(b"more")
    assert asked(file, second) == (content(b"first", b"more"), 2)
    assert asked(file, second) == (content(b"first", b"more"), 0)
    second.write_bytes(b"less")
    assert asked(file, second) == (content(b"first", b"less"), 2)


def test_a_file_just_changed_is_not_remembered(file: Path, asked: Callable[..., tuple[str, int]]) -> None:
    """A change within the same tick of the file system's clock would show in no time of the file."""
    asked(file, now=time.time_ns)
    assert asked(file) == (content(b"first"), 1)
    assert asked(file) == (content(b"first"), 0)


def test_a_file_changed_while_it_is_read_is_not_remembered(
    tmp_path: Path, file: Path, asked: Callable[..., tuple[str, int]]
) -> None:
    def meanwhile() -> str:
        found = content(file.read_bytes())
        file.write_bytes(b"other")
        return found

    with Digests(tmp_path / "kept", later) as digests:
        assert digests.of([file], "content", meanwhile) == content(b"first")
    assert asked(file) == (content(b"other"), 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: kept[:-1],
        lambda kept: kept.replace(b'"digests":{', b'"digests":[', 1),
        lambda kept: b"[" * 100_000,
        lambda kept: b"\0" * 99,
    ],
    ids=["empty", "cut", "flipped", "deep", "zeros"],
)
def test_a_damaged_store_says_nothing_and_is_made_anew(
    tmp_path: Path, file: Path, asked: Callable[..., tuple[str, int]], damage: Callable[[bytes], bytes]
) -> None:
    asked(file)
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    assert asked(file) == (content(b"first"), 1)
    assert asked(file) == (content(b"first"), 0)


@pytest.mark.parametrize("entries", [None, [], {}, {"x": 1}], ids=str)
@pytest.mark.parametrize("format_", [module._FORMAT, 99])
def test_what_is_no_store_of_this_folder_says_nothing(
    tmp_path: Path, file: Path, asked: Callable[..., tuple[str, int]], entries: object, format_: int
) -> None:
    asked(file)
    (kept,) = (tmp_path / "kept").iterdir()
    module.write_checked(kept, {"format": format_, "folder": str(file.parent), "digests": entries})
    assert asked(file) == (content(b"first"), 1)


@pytest.mark.parametrize("entry", [None, 3, [], [1, 2], [[[5, 1, 1, 1]], 7], ["states", "digest"]], ids=str)
def test_a_wrong_entry_is_passed_over(
    tmp_path: Path, file: Path, asked: Callable[..., tuple[str, int]], entry: object
) -> None:
    asked(file)
    (kept,) = (tmp_path / "kept").iterdir()
    found = module.read_checked(kept)
    found["digests"] = dict.fromkeys(found["digests"], entry)
    module.write_checked(kept, found)
    assert asked(file) == (content(b"first"), 1)


def read_each_time(folder: Path | None, file: Path) -> bool:
    """Whether two starts that keep their digests in `folder` both read the file."""
    read: list[int] = []
    for _ in range(2):
        with Digests(folder, later) as digests:
            digests.of([file], "content", lambda: str(read.append(1)))
    return len(read) == 2


def test_without_a_folder_or_with_one_that_cannot_be_written_every_start_reads(tmp_path: Path, file: Path) -> None:
    in_the_way = tmp_path / "in the way"
    in_the_way.write_bytes(b"")
    assert read_each_time(None, file)
    assert read_each_time(in_the_way, file)


def test_what_is_no_plain_file_is_never_known(tmp_path: Path) -> None:
    assert read_each_time(tmp_path / "kept", tmp_path)
    assert read_each_time(tmp_path / "kept", tmp_path / "missing")


def test_threads_share_one(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.bin" for i in range(40)]
    for i, each in enumerate(files):
        each.write_bytes(b"%d" % i)
    with Digests(tmp_path / "kept", later) as digests:
        made = [
            threading.Thread(target=lambda f=f: digests.of([f], "content", lambda: content(f.read_bytes())))
            for f in files
        ]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
    with Digests(tmp_path / "kept", later) as digests:
        found = [digests.of([f], "content", lambda: "read again") for f in files]
    assert found == [content(b"%d" % i) for i in range(40)]


_WRITER = """
import sys, pathlib, time
from flame_train.io.digests import Digests
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
later = lambda: time.time_ns() + 10_000_000_000
for i in range(30):
    with Digests(folder / "kept", later) as digests:
        digests.of([folder / "files" / "a.bin"], f"{number} {i}", lambda: f"digest {number} {i}")
"""


def test_processes_that_write_at_once_leave_a_whole_store(tmp_path: Path, file: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    (kept,) = [path for path in (tmp_path / "kept").iterdir() if not path.name.startswith(".")]
    found = module.read_checked(kept)["digests"]
    assert found  # who wrote last is in it; what is in it is right
    for what, kept_by_file in found.items():
        assert {digest for _, digest in kept_by_file.values()} == {f"digest {what}"}
