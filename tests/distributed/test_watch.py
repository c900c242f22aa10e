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


def test_the_leading_process_answers_for_all():
    class Leader(Echo):
        def all_gather(self, data):
            return [b"yes", data]

    assert ProcessGroup(1, 2, Leader()).answered(False) is True
    assert ProcessGroup().answered(False) is False
