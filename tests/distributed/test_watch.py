"""Signs of life: an error is told to the others, a full disk is no death, a folder of one process alone is refused."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import threading

import pytest

from flame_train.distributed import watch
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.watch import Watch
from flame_train.errors import OutOfMemory, OutputError
from flame_train.io.run_files import SIGNS


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
        told = json.loads((tmp_path / SIGNS / "1.json").read_text())
    assert (told["code"], told["message"]) == (5, "no room")


@pytest.fixture
def ended(monkeypatch):
    """Set where a watch, which looks often here, ends its process."""
    event = threading.Event()
    monkeypatch.setattr(watch, "_EVERY", 0.02)
    monkeypatch.setattr(watch, "_SILENT", 0.3)
    monkeypatch.setattr(os, "_exit", lambda code: event.set())
    return event


def test_a_full_disk_is_no_silence(tmp_path, monkeypatch, ended):
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path):

        def full(*args):
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(watch, "write_unsynced", full)
        assert not ended.wait(1.5)


def test_a_disk_that_tells_old_times_is_no_silence(tmp_path, monkeypatch, ended):
    """As one of a network does, which keeps what it knows of a file for up to a minute."""
    written = watch.write_unsynced

    def write(target, raw):
        written(target, raw)
        os.utime(target.path, (1, 1))

    monkeypatch.setattr(watch, "write_unsynced", write)
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path):
        assert not ended.wait(1.5)


def test_a_process_that_writes_no_more_is_gone(tmp_path, ended, capsys):
    lead, _ = groups()
    with Watch(lead, tmp_path):
        (tmp_path / SIGNS / "1.json").write_text(json.dumps({"pid": 7, "host": "there"}))
        assert ended.wait(30)
    assert "rank 1 (there, process 7) has given no sign of life" in capsys.readouterr().err


def test_where_all_stand_still_one_waits_in_vain(tmp_path, monkeypatch, ended, capsys):
    """One waits for the other, which neither comes nor does anything: it hangs in a callback, or on a dead disk."""
    monkeypatch.setattr(watch, "_STILL", 0.3)
    monkeypatch.setattr(watch, "_worked", lambda: 7.0)
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path), lead.meeting():
        assert ended.wait(30)
    assert re.search(r"rank 0 waits in meeting \d+; rank 1 stands after meeting \d+", capsys.readouterr().err)


def test_a_process_that_works_may_be_waited_for(tmp_path, monkeypatch, ended):
    monkeypatch.setattr(watch, "_STILL", 0.3)
    seconds = itertools.count()
    monkeypatch.setattr(watch, "_worked", lambda: float(next(seconds)))
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path), lead.meeting():
        assert not ended.wait(1.5)


def test_what_lies_behind_a_link_is_left_alone(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "1.json").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / SIGNS).symlink_to(theirs)
    lead, _ = groups()
    with pytest.raises(OutputError, match=r"\.ranks"), Watch(lead, run):
        pass
    assert (theirs / "1.json").read_text() == "precious"


def test_what_lies_among_the_signs_is_left_alone(tmp_path):
    """A folder of another name, a link and a pipe in place of a sign."""
    (tmp_path / SIGNS / "x.json").mkdir(parents=True)
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / SIGNS / "0.json").symlink_to(tmp_path / "theirs")
    os.mkfifo(tmp_path / SIGNS / "1.json")
    lead, other = groups()
    with Watch(lead, tmp_path), Watch(other, tmp_path):
        assert json.loads((tmp_path / SIGNS / "1.json").read_text())["pid"] == os.getpid()
    assert (tmp_path / "theirs").read_text() == "precious"
    assert (tmp_path / SIGNS / "x.json").is_dir()


def test_the_leading_process_answers_for_all():
    class Leader(Echo):
        def all_gather(self, data):
            return [b"yes", data]

    assert ProcessGroup(1, 2, Leader()).broadcast(False) is True
    assert ProcessGroup().broadcast(False) is False
