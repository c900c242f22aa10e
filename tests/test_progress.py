"""Progress of long work: what fits on a terminal, what stands where there is none, and what nobody sees."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm.std import tqdm

from flame_train.progress import bar_format, clock, progress

ROOT = Path(__file__).parents[1]
PARTS = ["10:01:02<12:00:10", "loss 0.000293", "1.32 it/s", "ep 10.1/20", "12.3 GiB", "lr 1.00e-04"]


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    ours = logging.getLogger("flame_train")
    level = ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.setLevel(level)


def fitted(before: str, parts: list[str], done: float, *, width: int) -> str:
    """The line as tqdm draws it."""
    return tqdm.format_meter(done, 1, 0, ncols=width, bar_format=bar_format(before, parts, width=width))


@pytest.mark.parametrize("width", range(20, 200))
def test_a_line_fits_and_what_matters_less_goes_first(width: int) -> None:
    line = fitted("19002/20000", PARTS, 0.5, width=width)
    assert len(line) < width
    there = [part in line for part in PARTS]
    assert there == sorted(there, reverse=True)


def test_eighty_columns_hold_step_bar_times_loss_pace_epoch_and_memory() -> None:
    line = fitted("90/20000", ["0:01:02<1:00:10", *PARTS[1:]], 0.5, width=80)
    assert all(part in line for part in PARTS[1:5])
    assert "█" in line


def test_the_bar_is_as_full_as_the_work() -> None:
    assert [fitted("", [], done, width=80).count("█") for done in (0.0, 0.5, 1.0)] == [0, 20, 40]


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr("flame_train.progress.time.monotonic", monotonic)


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticking(monkeypatch, 2.0)
    with progress("encoding images", 20) as advance:
        for _ in range(20):
            advance(1)
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == 4  # in 42 seconds
    assert all(re.fullmatch(r"encoding images \d+/20  \d:\d\d:\d\d<\d:\d\d:\d\d", line) for line in lines)
    assert re.fullmatch(r"encoding images: 20 in \d:\d\d:\d\d", last)


def test_short_work_and_work_of_a_silent_process_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("merging", 3) as advance:
        advance(3)
    ticking(monkeypatch, 60.0)
    with progress("sampling", 0) as advance:
        advance(1)
    logging.getLogger("flame_train").setLevel(logging.ERROR)
    with progress("merging", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""


def test_nobody_reading_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for stream in (Gone(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        ticking(monkeypatch, 60.0)
        with progress("merging", 3) as advance:
            advance(3)


def test_bytes_are_told_in_gibibytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ticking(monkeypatch, 60.0)
    with progress("hashing model.safetensors", 3 << 30, in_bytes=True) as advance:
        advance(3 << 30)
    assert "hashing model.safetensors: 3.00 GiB in 0:0" in capsys.readouterr().err
    assert clock(3723.9) == "1:02:03"


_PROGRAM = """
import logging, time, flame_train.progress as p
p._SOON_S = 0.0
log = logging.getLogger("flame_train"); log.addHandler(p.LogLines()); log.setLevel(logging.INFO)
outer = p.Bar(lambda: ("5/10", ["0:00:01<0:00:02"], 0.5)); assert outer.open()
time.sleep(0.5)
log.info("checkpoint of step 5: %s", "/a/" + "long/" * 20 + "end")
with p.progress("sampling", 4) as advance:
    for _ in range(4): advance(1); time.sleep(0.3)
outer.close()
"""


def test_on_a_terminal_lines_stand_whole_above_bars_that_come_and_go() -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    child = subprocess.Popen([sys.executable, "-c", _PROGRAM], stderr=follower, env=environment)
    os.close(follower)
    raw = b""
    try:
        while part := os.read(leader, 4096):
            raw += part
    except OSError:  # the other end was closed
        pass
    os.close(leader)
    assert child.wait() == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", raw.decode()))
    assert f"checkpoint of step 5: /a/{'long/' * 20}end" in lines
    assert any(re.fullmatch(r"5/10 █+ +0:00:01<0:00:02 *", line) for line in lines)
    assert any(re.match(r"sampling [1-4]/4 █+ +\d:\d\d:\d\d<\d:\d\d:\d\d", line) for line in lines)
    assert any(re.fullmatch(r"sampling: 4 in \d:\d\d:\d\d", line) for line in lines)
