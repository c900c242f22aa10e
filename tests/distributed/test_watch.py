"""Signs of life: an error is told to the others, a full disk is no death, a folder of one process alone is refused."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from flame_train.distributed import watch
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.watch import FOLDER, Watch
from flame_train.errors import OutOfMemory


class Echo:
    """A transport to processes that all say what this one says."""

    captured = False

    def all_reduce(self, array):
        raise AssertionError

    def all_gather(self, data):
        return [data, data]

    def abort(self, code):
        raise AssertionError


def groups():
    return ProcessGroup(0, 2, Echo()), ProcessGroup(1, 2, Echo())


def test_the_error_of_one_process_stays_for_the_others_to_read(tmp_path):
    lead, other = groups()
    with Watch(lead, tmp_path):
        with pytest.raises(OutOfMemory), Watch(other, tmp_path) as mine, mine.telling():
            raise OutOfMemory("no room")
        told = json.loads((tmp_path / FOLDER / "1.json").read_text())
    assert (told["code"], told["message"]) == (5, "no room")


def test_a_full_disk_is_no_silence(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(watch, "_EVERY", 0.02)
    monkeypatch.setattr(watch, "_SILENT", 0.3)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path):

        def full(*args, **keywords):
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(Path, "write_text", full)
        assert not ended.wait(1.5)


def test_a_disk_that_tells_old_times_is_no_silence(tmp_path, monkeypatch):
    """As one of a network does, which keeps what it knows of a file for up to a minute."""
    ended = threading.Event()
    monkeypatch.setattr(watch, "_EVERY", 0.02)
    monkeypatch.setattr(watch, "_SILENT", 0.3)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    written = Path.replace

    def replace(part, target):
        os.utime(part, (1, 1))
        return written(part, target)

    monkeypatch.setattr(Path, "replace", replace)
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path):
        assert not ended.wait(1.5)


def test_a_process_that_writes_no_more_is_gone(tmp_path, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(watch, "_EVERY", 0.02)
    monkeypatch.setattr(watch, "_SILENT", 0.3)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    lead, _ = groups()
    with Watch(lead, tmp_path):
        (tmp_path / FOLDER / "1.json").write_text(json.dumps({"pid": 7, "host": "there"}))
        assert ended.wait(30)
    assert "rank 1 (there, process 7) has given no sign of life" in capsys.readouterr().err


def test_the_leading_process_answers_for_all():
    class Leader(Echo):
        def all_gather(self, data):
            return [b"yes", data]

    assert ProcessGroup(1, 2, Leader()).broadcast(False) is True
    assert ProcessGroup().broadcast(False) is False
