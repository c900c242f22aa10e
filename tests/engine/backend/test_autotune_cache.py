"""Answers kept on disk: what is read is what was written, for that question and machine, or nothing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flame_train.engine.backend.cuda.autotuner import AutotuneCache, default_folder


def test_an_answer_comes_back_in_another_process_s_eyes(tmp_path: Path) -> None:
    AutotuneCache(tmp_path / "deep" / "er", "a card").put("which?", b"this\none\x00")
    assert AutotuneCache(tmp_path / "deep" / "er", "a card").get("which?") == b"this\none\x00"


@pytest.mark.parametrize(("place", "question"), [("another card", "which?"), ("a card", "which one?")])
def test_it_answers_no_other_question_and_for_no_other_machine(tmp_path: Path, place: str, question: str) -> None:
    AutotuneCache(tmp_path, "a card").put("which?", b"this")
    assert AutotuneCache(tmp_path, place).get(question) is None


def test_a_later_answer_replaces_the_first(tmp_path: Path) -> None:
    cache = AutotuneCache(tmp_path, "a card")
    cache.put("which?", b"this")
    cache.put("which?", b"that")
    assert cache.get("which?") == b"that"
    assert len(list(tmp_path.iterdir())) == 1


def test_no_damaged_byte_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = AutotuneCache(tmp_path, "a card")
    cache.put("which?", b"this")
    path, whole = cache.path("which?"), cache.path("which?").read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for content in [*damaged, *(whole[:i] for i in range(len(whole))), whole + b"x"]:
        path.write_bytes(content)
        caplog.clear()
        assert cache.get("which?") is None
        assert str(path) in caplog.text
        assert "damaged" in caplog.text
    cache.put("which?", b"that")
    assert cache.get("which?") == b"that"


def test_one_answer_under_another_s_name_is_refused(tmp_path: Path) -> None:
    cache = AutotuneCache(tmp_path, "a card")
    cache.put("which?", b"this")
    cache.path("where?").write_bytes(cache.path("which?").read_bytes())
    assert cache.get("where?") is None


def _write(folder: Path, who: int) -> None:
    cache = AutotuneCache(folder, "a card")
    for n in range(40):
        cache.put("shared", bytes([who]) * 50_000)
        cache.put(f"{who} {n}", f"{who} {n}".encode())


def test_writers_at_once_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    start = multiprocessing.get_context("spawn")
    processes = [start.Process(target=_write, args=(tmp_path, who)) for who in range(2)]
    threads = [threading.Thread(target=_write, args=(tmp_path, who)) for who in (2, 3)]
    for worker in (*processes, *threads):
        worker.start()
    cache, whole = AutotuneCache(tmp_path, "a card"), {bytes([who]) * 50_000 for who in range(4)}
    while any(w.is_alive() for w in (*processes, *threads)):
        assert cache.get("shared") in (None, *whole)
    for worker in (*processes, *threads):
        worker.join()
    assert [p.exitcode for p in processes] == [0, 0]
    assert cache.get("shared") in whole
    assert all(cache.get(f"{who} {n}") == f"{who} {n}".encode() for who in range(4) for n in range(40))
    assert len(list(tmp_path.iterdir())) == 4 * 40 + 1, "nothing half-written is left over"


def test_a_link_in_place_of_a_file_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    cache = AutotuneCache(tmp_path / "choices", "a card")
    cache.folder.mkdir()
    path = cache.path("which?")
    for name in (path.name, f".{path.name}.{os.getpid()}.{threading.get_ident()}"):  # the latter was guessed once
        (cache.folder / name).symlink_to(tmp_path / "theirs")
    cache.put("which?", b"this")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not path.is_symlink()
    assert cache.get("which?") == b"this"


_KILLED = """
import sys
from pathlib import Path
from flame_train.disk import failpoint
from flame_train.engine.backend.cuda.autotuner import AutotuneCache
failpoint.arm("file.before_rename")
AutotuneCache(Path(sys.argv[1]), "a card").put("which?", b"this")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    cache = AutotuneCache(tmp_path, "a card")
    cache.put("where?", b"there")
    assert list(tmp_path.iterdir()) == [cache.path("where?")]


def test_where_nothing_can_be_kept_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("no folder")
    cache = AutotuneCache(tmp_path / "taken", "a card")
    with caplog.at_level(logging.WARNING):
        cache.put("which?", b"this")
        cache.put("where?", b"there")
    assert caplog.text.count("cannot be written there") == 1


def test_one_entry_that_cannot_be_replaced_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = AutotuneCache(tmp_path, "a card")
    cache.path("which?").mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.put("which?", b"this")
            cache.put("where?", b"there")
    assert AutotuneCache(tmp_path, "a card").get("where?") == b"there"
    assert caplog.text.count(f"{cache.path('which?')}: cannot be replaced") == 1
    assert len(list(tmp_path.iterdir())) == 2, "nothing half-written is left over"


def test_without_a_home_nothing_is_kept_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:  # as pathlib has it for a user without an entry in the system's table
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache = AutotuneCache(default_folder(), "a card")
    with caplog.at_level(logging.WARNING):
        cache.put("which?", b"this")
        cache.put("where?", b"there")
    assert cache.get("which?") is None
    assert caplog.text.count("XDG_CACHE_HOME") == 1


def test_the_folder_follows_the_user_s_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "flame-train" / "choices"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, which the standard says to ignore")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "flame-train" / "choices"


def test_what_cannot_be_read_is_said_and_found_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = AutotuneCache(tmp_path, "a card")
    cache.path("which?").mkdir()
    with caplog.at_level(logging.WARNING):
        assert cache.get("which?") is None
    assert "cannot be read" in caplog.text
