"""The loop asked to stop, and grids that fail: what is saved, and what is left for the next run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from flame_train.config import schema
from flame_train.errors import DeviceFault, Interrupted
from flame_train.io.runfolder import RunFolder
from flame_train.run.train.sample_grids import best_effort
from flame_train.training import loop
from flame_train.training.session import StopRequest
from tests.run_files import log_of
from tests.training.toy import Feed, steps_of


@pytest.mark.parametrize("exists", [True, False])
def test_a_grid_that_the_last_run_did_not_come_to_is_drawn_first(trained, exists):
    """It was stopped between the checkpoint of step 4 and the grid of step 4."""
    trained(Feed(1), train={"steps": 4, "precision": "fp32"})
    drawn: list[int] = []

    def put(folder: RunFolder) -> None:
        folder.samples.mkdir(exist_ok=True)
        if exists:
            folder.sample(4).write_bytes(b"an image")

    run, _ = trained(Feed(1), sample_images=drawn.append, before=put, sample={"every": 4, "prompts": ("a disc",)})
    assert run.first == 4
    assert drawn == ([8] if exists else [4, 8])


def test_a_request_before_the_first_step_is_heeded(trained, tmp_path):
    stop = StopRequest()
    stop.signal_number = 15
    feed = Feed(1)
    with pytest.raises(Interrupted, match="stopped before the next step; run the same command to continue"):
        trained(feed, stop=stop)
    assert feed.events == []
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("during", ["take", "grid"])
def test_a_request_saves_the_step_that_is_being_made(trained, tmp_path, during):
    stop = StopRequest()

    def ask(number: int, wanted: str) -> None:
        if (during, number) == (wanted, 4):
            stop.signal_number = 2

    feed = Feed(1, on_take=lambda micro: ask(micro + 1, "take"))
    with pytest.raises(Interrupted, match="stopped after step 4, saved; run the same command to continue"):
        trained(feed, stop=stop, sample_images=lambda step: ask(step, "grid"), sample={"every": 2})
    assert steps_of(tmp_path / "run") == [4]
    assert [r["step"] for r in log_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "lora.safetensors").exists()


def last_step_asks(stop: StopRequest) -> Feed:
    def ask(micro: int) -> None:
        stop.signal_number = 15 if micro == 7 else 0

    return Feed(1, on_take=ask)


@pytest.mark.parametrize("sample", [{"every": 3, "prompts": ("a disc",)}, {"every": 4}], ids=["none due", "no prompts"])
def test_a_request_in_the_last_step_comes_too_late(trained, tmp_path, sample):
    """There is nothing left to stop: the run is done, to the last byte."""
    stop = StopRequest()
    trained(last_step_asks(stop), stop=stop, sample=sample)
    trained(Feed(1), name="undisturbed", sample=sample)
    assert stop.requested
    assert steps_of(tmp_path / "run") == [8]
    result, expected = ((tmp_path / name / "lora.safetensors").read_bytes() for name in ("run", "undisturbed"))
    assert result == expected


def test_a_request_in_the_last_step_leaves_its_grid_for_the_next_run(trained, tmp_path):
    stop, drawn = StopRequest(), []
    sample = {"every": 4, "prompts": ("a disc",)}
    with pytest.raises(Interrupted, match="stopped after step 8"):
        trained(last_step_asks(stop), stop=stop, sample=sample, sample_images=drawn.append)
    assert drawn == [0, 4]
    assert (tmp_path / "run" / "lora.safetensors").exists()
    trained(Feed(1), sample=sample, sample_images=drawn.append)
    assert drawn == [0, 4, 8]


def test_a_request_to_a_run_that_is_done_changes_nothing(trained):
    trained(Feed(1))
    stop = StopRequest()
    stop.signal_number = 15
    run, _ = trained(Feed(1), stop=stop)
    assert run.first == 8


@pytest.mark.parametrize("error", [OSError("full"), MemoryError(), ValueError("shape"), KeyError("x")])
def test_a_grid_that_fails_costs_a_warning(error, caplog):
    def fail(step: int) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        best_effort(fail)(7)
    assert "no sample grid at step 7" in caplog.text
    assert type(error).__name__ in caplog.text


def test_a_grid_that_is_cut_short_by_a_request_is_no_failure(caplog):
    stop = StopRequest()
    stop.signal_number = 2
    best_effort(lambda step: stop.check("while sampling"))(7)
    assert caplog.text == ""


CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})


@pytest.mark.parametrize(
    "error", [DeviceFault("lost"), CUDARuntimeError("cudaErrorLaunchFailure"), KeyboardInterrupt()]
)
def test_what_a_grid_does_not_survive(error):
    def fail(step: int) -> None:
        raise error

    with pytest.raises(type(error)):
        best_effort(fail)(7)


def test_a_grid_that_cannot_be_looked_at_is_one_that_lacks():
    """A name that is too long stands for a folder that may not be entered: the grid is tried, and costs a warning."""
    sample = schema.SampleSection(every=250, prompts=("a disc",))
    folder = RunFolder(Path("a" * 300), "", lambda old, found: None)
    run = SimpleNamespace(sample=sample, folder=folder, epoch=lambda step: 0.0)
    assert loop._lacks_grid(run, 250)
