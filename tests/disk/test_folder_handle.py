"""Names below a held folder, by its descriptor and by its path: what is read, written and refused must be the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.disk import open_folder
from flame_train.disk.atomic_write import create_temporary, remove_stale, write_atomically
from flame_train.disk.folder_handle import FolderHandle, PathHandle, open_handle
from flame_train.disk.open_folder import FolderLost, OpenFolder
from flame_train.errors import OutputError
from flame_train.io.runfolder import RunFolder
from flame_train.io.runlog import state_of

FILES = {"lora.safetensors": b"lora", "state.json": b"{}"}
MAKE = os.O_WRONLY | os.O_CREAT


@pytest.fixture(params=[open_handle, PathHandle])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], OpenFolder]:
    """folder(): the folder `here`, held in either way, as every other one from then on."""
    kind: Callable[[Path], FolderHandle] = request.param
    monkeypatch.setattr(open_folder, "open_handle", kind)
    (tmp_path / "here").mkdir()
    return lambda: OpenFolder.open(tmp_path / "here")


@pytest.fixture
def by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_folder, "open_handle", PathHandle)


def test_files_and_folders_are_made_read_renamed_and_removed(folder: Callable[[], OpenFolder], tmp_path: Path) -> None:
    here = tmp_path / "here"
    with folder() as opened:
        write_atomically(opened / "one", [b"first"], 5)
        write_atomically(opened / "one", [b"second"], 6)
        with opened.folder("inside", make=True) as inside, opened.folder("inside", make=True) as again:
            write_atomically(inside / "two", [b"2"], 1)
            assert again.read("two", 9) == b"2"
        assert opened.names() == ["inside", "one"]
        assert opened.read("one", 3) == b"sec"
        opened.rename("inside", "outside")
        assert (here / "outside" / "two").read_bytes() == b"2"
        opened.remove("outside")
        opened.remove("one")
        assert opened.lstat("one") is None
        opened.sync()
        opened.check()
    assert os.listdir(here) == []


def test_no_link_in_the_folder_is_followed(folder: Callable[[], OpenFolder], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"other")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "other" / "file")
    (tmp_path / "here" / "dangling").symlink_to(tmp_path / "other" / "new")
    (tmp_path / "here" / "folder").symlink_to(tmp_path / "other")
    with folder() as opened:
        for name in ("link", "dangling"):
            for flags in (os.O_RDONLY, MAKE, MAKE | os.O_EXCL):
                with pytest.raises(OSError, match=r"Too many levels|File exists"):
                    opened.file(name, flags)
        for make in (False, True):
            with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
                opened.folder("folder", make=make)
        for name in ("link", "dangling", "folder"):
            opened.remove(name)
    assert os.listdir(tmp_path / "other") == ["file"]
    assert (tmp_path / "other" / "file").read_bytes() == b"other"


def test_what_is_no_plain_file_is_not_read(folder: Callable[[], OpenFolder], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "here" / "pipe")
    (tmp_path / "here" / "inside").mkdir()
    with folder() as opened:
        for name in ("pipe", "inside"):
            with pytest.raises(OSError, match=r"not a plain file|Is a directory"):
                opened.read(name, 9)


def test_a_folder_may_be_reached_by_a_link(folder: Callable[[], OpenFolder], tmp_path: Path) -> None:
    folder()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    with OpenFolder.open(tmp_path / "link") as opened:
        write_atomically(opened / "one", [b"1"], 1)
        opened.check()
    assert (tmp_path / "here" / "one").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "inside/file"])
def test_by_path_a_name_leads_nowhere_else(by_path: None, tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    with OpenFolder.open(tmp_path) as opened, pytest.raises(OSError, match="not a name in a folder"):
        opened.file(name, MAKE)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace(path: Path) -> None:
    move(path)
    path.mkdir()
    (path / "inside").mkdir()


def link(path: Path) -> None:
    replace(path)
    path.rename(path.with_name("third"))
    path.symlink_to("third")


@pytest.mark.parametrize("way", [move, replace, link])
def test_by_path_nothing_is_written_where_another_folder_is(
    by_path: None, tmp_path: Path, way: Callable[[Path], None]
) -> None:
    path = tmp_path / "here"
    path.mkdir()
    with OpenFolder.open(path) as opened, opened.folder("inside", make=True) as inside:
        way(path)
        there = sorted(tmp_path.rglob("*"))
        for held_folder in (opened, inside):
            with pytest.raises(OSError, match=r"replaced by another|No such file|levels of symbolic"):
                held_folder.file("new", MAKE)
            with pytest.raises(FolderLost, match="cannot tell where the folder is now"):
                write_atomically(held_folder / "new", [b"new"], 3)
    assert sorted(tmp_path.rglob("*")) == there


def test_by_path_a_run_whose_folder_was_replaced_stops(by_path: None, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def carry_on() -> None:
        with RunFolder(path, "a = 1\n", lambda old, found: None) as run:
            run.resume()
            run.checkpoint(1, FILES, keep=1)
            replace(path)
            run.checkpoint(2, FILES, keep=1)

    with pytest.raises(FolderLost):
        carry_on()
    assert [p.name for p in path.iterdir()] == ["inside"]
    assert os.listdir(path / "inside") == []
    assert state_of(tmp_path / "moved")["state"] == "interrupted"
    with RunFolder(tmp_path / "moved", "a = 1\n", lambda old, found: None) as again:
        found = again.resume()
        assert found is not None
        assert found.step == 1


def test_a_sweep_spares_what_somebody_writes(folder: Callable[[], OpenFolder]) -> None:
    with folder() as opened:
        name, descriptor = create_temporary(opened, "file")
        os.utime(descriptor, (0, 0))
        remove_stale(opened)
        assert opened.names() == [name]
        os.close(descriptor)
        remove_stale(opened)
        assert opened.names() == []


def test_by_path_a_sweep_spares_what_may_be_about_to_get_its_name(by_path: None, tmp_path: Path) -> None:
    with OpenFolder.open(tmp_path) as opened:
        name, descriptor = create_temporary(opened, "file")
        os.close(descriptor)
        remove_stale(opened)
        assert opened.names() == [name]
        hour_ago = time.time() - 3600
        os.utime(tmp_path / name, (hour_ago, hour_ago))
        remove_stale(opened)
        assert opened.names() == []


def test_by_path_a_failed_write_leaves_what_was_there(by_path: None, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OutputError), OpenFolder.open(tmp_path) as opened:
        write_atomically(opened / "file", [b"new"], 3)
    assert os.listdir(tmp_path) == ["file"]
