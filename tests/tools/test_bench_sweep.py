"""`bench step --sweep batch`: what it draws, what it keeps when something goes wrong, what it refuses beforehand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from flame_train import cli
from flame_train.errors import DeviceFault, OutputError
from flame_train.tools import bench
from flame_train.tools.bench import batch_sweep as sweep
from flame_train.tools.bench import lora_step

SWEEP = ["bench", "step", "--model", "sdxl-tiny", "--sweep", "batch", "--device", "cpu"]


def test_sweep_doubles_until_memory_runs_out_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(case: bench.BenchCase) -> dict[str, float]:
        if case.batch > 4:
            raise MemoryError
        return {"eager_ms": 100.0 + 10.0 * case.batch, "peak_gib": 2.0 + case.batch}

    monkeypatch.setattr(sweep, "step", stand_in)
    found, failed = sweep.run(bench.BenchCase("sdxl-tiny", device="cpu"), tmp_path / "plot.png")
    assert [r["batch"] for r in found["sweep"]] == [1, 2, 4]
    assert found["sweep"][2]["images_per_s"] == round(4000 / 140, 3)
    assert found["stopped at"] == "out of memory at batch 8"
    assert failed is None
    with Image.open(tmp_path / "plot.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16)}
    assert {(0x1F, 0x6F, 0xB4), (0xC8, 0x50, 0x1E)} <= colours  # both curves are there


def test_what_was_the_same_at_every_batch_is_told_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr(sweep, "step", lambda case: {"eager_ms": 100.0, "peak_gib": None})
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda _, place, text, *more: titles.append(text))
    case = bench.BenchCase("flux-tiny", 512, 3, 7, "fp16", "full", "cpu", False, "fp8")
    found, _ = sweep.run(case, tmp_path / "plot.png")
    what = {name: value for name, value in asdict(case).items() if name != "batch"}
    assert {name: found[name] for name in what} == what
    assert all(word in titles[0] for word in ("flux-tiny", "512", "7", "fp16", "full", "cpu", "not det", "fp8"))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (DeviceFault("the card fell off the bus"), 5, "batch 4: the card fell off the bus"),
        (KeyboardInterrupt(), 130, "batch 4: interrupted"),
        (ValueError("a bug"), 1, "batch 4: ValueError: a bug"),
    ],
)
def test_what_was_measured_is_shown_whatever_comes_after(
    error: BaseException,
    status: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stand_in(case: bench.BenchCase) -> dict[str, float]:
        if case.batch == 4:
            raise error
        return {"eager_ms": 100.0, "peak_gib": 2.0}

    monkeypatch.setattr(sweep, "step", stand_in)
    assert cli.run([*SWEEP, "--plot", str(tmp_path / "plot.png"), "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert [r["batch"] for r in found["sweep"]] == [1, 2]
    assert found["stopped at"] == reason
    assert (tmp_path / "plot.png").exists()


def test_an_image_that_cannot_be_written_takes_no_rows_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(sweep, "step", lambda case: {"eager_ms": 100.0, "peak_gib": 2.0})
    monkeypatch.setattr(sweep, "write_png", full)
    assert cli.run([*SWEEP, "--plot", str(tmp_path / "plot.png"), "--json"]) == 6
    out, err = capsys.readouterr()
    assert len(json.loads(out)["sweep"]) == 7
    assert json.loads(out)["plot"] is None
    assert "the disk is full" in err


def test_nothing_measured_is_an_error_and_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(case: bench.BenchCase) -> dict[str, float]:
        raise MemoryError

    monkeypatch.setattr(sweep, "step", stand_in)
    assert cli.run([*SWEEP, "--plot", str(tmp_path / "plot.png")]) == 5
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("plot", "status", "message"),
    [
        ("a.txt", 2, "a.txt: expected a name ending in .png, got .txt"),
        ("/proc/x/y.png", 6, "/proc/x: cannot be made"),
        ("folder.png", 6, "is a folder; give the name of a file to write"),
        ("file/y.png", 6, "is a file; choose another place"),
    ],
)
def test_an_image_that_could_not_be_written_is_told_before_anything_is_measured(
    plot: str,
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begun(*arguments: object) -> None:
        raise AssertionError("work was begun")

    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "step", begun)
    assert cli.run([*SWEEP, "--plot", plot]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--plot a.png", "--plot is the image of a sweep; add --sweep batch, or leave it out"),
        ("--sweep batch --batch 8", "a sweep doubles the batch from 1; leave one of --sweep and --batch out"),
        ("--sweep batch --batch 1", "a sweep doubles the batch from 1; leave one of --sweep and --batch out"),
    ],
)
def test_options_that_would_be_dropped_are_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*arguments: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(lora_step, "prepare", begun)
    assert cli.run(["bench", "step", "--model", "sdxl-tiny", "--device", "cpu", *options.split()]) == 2
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in err


def test_a_sweep_is_not_held_against_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "step", "--sweep", "batch", "--against", "torch", "--device", "cpu"]) == 2
    assert "leave one of --sweep and --against out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("largest", "top"), [(31.9, 40.0), (54.8, 80.0), (100.0, 100.0), (0.013, 0.02), (1040.0, 2000.0)]
)
def test_axes_end_at_round_scalars(largest: float, top: float) -> None:
    assert sweep._round_up(largest) == pytest.approx(top)
