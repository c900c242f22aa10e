"""What a run says while it runs, and that nothing about saying it can end the run."""

from __future__ import annotations

import errno
import io
import math
import re
import sys
from typing import Any

import pytest

from flame_train.training.log import Console


def record(step: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    usual = {"lr": 1e-3, "grad_norm": 0.5, "loss_scale": 1.0, "images_per_s": 2.0, "data_wait_ms": 1.0, "memory": 2**30}
    return {"step": step, "loss": loss, **usual, **more}


class NonFiniteFlags(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "gone")


_FIRST_LINE = (
    r"step 3/5  mean loss 1  lr 1\.00e-03  \|g\| 0\.5  2\.00 img/s  2\.00 it/s  1\.0 GiB  "
    r"elapsed 0:00:00  ETA \d:\d\d:\d\d"
)


def test_lines_come_at_the_beginning_and_the_end(capsys):
    with Console(5, 2) as console:
        for step in range(3, 6):
            console.show(record(step), 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["3/5", "5/5"]
    assert re.fullmatch(_FIRST_LINE, lines[0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_a_terminal_of_any_width_shows_the_step_and_the_time_left_whole(monkeypatch, columns):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    with Console(20000, 19000) as console:
        for step in (19001, 19002):
            console.show(record(step, 0.00029312, grad_norm=0.00010812), 0.5)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", terminal.getvalue()).split("\r")
    last = [line.strip() for line in shown if line.strip()][-1]
    assert re.match(r"19002/20000 .* \d:\d\d:\d\d<\d:\d\d:\d\d loss 0\.0002931 2\.00 it/s", last)
    assert len(last) <= columns


def test_the_time_left_is_counted_from_the_first_step_on(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("flame_train.training.log.time.monotonic", lambda: clock[0])
    with Console(3, 0) as console:
        for step, now in ((1, 602.0), (2, 604.0), (3, 606.0)):  # ten minutes for a grid, then two seconds a step
            clock[0] = now
            console.show(record(step), 2.0)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("ETA 0:00:04")
    assert last.endswith("ETA 0:00:00")


def test_small_figures_keep_their_digits(capsys):
    with Console(1, 0) as console:
        console.show(record(1, 0.00029142, grad_norm=0.00051234), 0.5)
    line = capsys.readouterr().err
    assert "mean loss 0.0002914 " in line
    assert "|g| 0.000512 " in line


def test_the_least_and_the_largest_norm_of_a_block_stand_beside_the_loss_until_the_next(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr("flame_train.training.log.time.monotonic", lambda: next(clock))
    with Console(3, 0) as console:
        console.show(record(1), 0.5)
        console.show(record(2, gradients={"mid_block": 0.25, "down_blocks.0": 0.00123456, "up_blocks.2": 0.03}), 0.5)
        console.show(record(3), 0.5)
    first, *others = capsys.readouterr().err.splitlines()
    assert "|g| 0.5  2.00 img/s" in first
    for line in others:
        assert "|g| 0.5 (0.00123 down_blocks.0, 0.25 mid_block)  2.00 img/s" in line


@pytest.mark.parametrize(
    ("norms", "told"),
    [
        ({"proj": 0.5}, "(0.5 proj)"),
        ({"a": math.nan, "b": 1.0, "c": math.inf}, "(1 b, nan a)"),
        ({"a": 2.0, "b": 1.0, "c": math.inf}, "(1 b, inf c)"),
    ],
)
def test_a_block_whose_gradient_is_not_finite_is_the_one_shown(norms, told, capsys):
    with Console(1, 0) as console:
        console.show(record(1, gradients=norms), 0.5)
    assert f"|g| 0.5 {told}  " in capsys.readouterr().err


def test_memory_that_cannot_be_told_is_left_out(capsys):
    with Console(1, 0) as console:
        console.show(record(1, memory=None), 0.5)
    line = capsys.readouterr().err
    assert "2.00 it/s  elapsed" in line


@pytest.mark.parametrize(("wait", "told"), [(0.0, False), (49.0, False), (51.0, True), (600.0, True)])
def test_waiting_for_data_is_told_from_a_tenth_of_the_step_on(wait, told, capsys):
    with Console(1, 0) as console:
        console.show(record(1, data_wait_ms=wait), 0.5)
    assert (f"  waits {wait:.0f} ms for data  elapsed" in capsys.readouterr().err) == told


def test_the_smooth_loss_passes_over_an_overflow(capsys):
    with Console(4, 0) as console:
        for step, loss in enumerate((1.0, math.inf, math.nan, 2.0), 1):
            console.show(record(step, loss, grad_norm=math.inf), 0.5)
    assert "mean loss 1.05 " in capsys.readouterr().err.splitlines()[-1]


def test_an_overflow_at_the_first_step_is_forgotten(capsys):
    with Console(2, 0) as console:
        console.show(record(1, math.inf), 0.5)
        console.show(record(2, 3.0), 0.5)
    assert "mean loss 3 " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("stream", [NonFiniteFlags(), None])
def test_nobody_reads_standard_error(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with Console(1, 0) as console:
        console.show(record(1), 0.5)
