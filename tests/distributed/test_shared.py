"""Validation and sample grids: shared by the processes, and the same bytes whatever their number."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.run_files import log_of

from .conftest import Study

SETTINGS: dict[str, Any] = {
    "train__steps": 1,
    "optimizer__lr": 1e-20,  # so that the order of a sum, which depends on their number, reaches no weight
    "sample__every": 1,
    "sample__steps": 1,
    "sample__prompts": ("a wave", "two waves", "a calm sea"),
    "validation__fraction": 0.4,
    "validation__every": 1,
    "validation__timesteps": 2,
}


def shown(runs: Study, name: str) -> tuple[dict[str, bytes], list[Any]]:
    """The bytes of the grids, and what the log says of validations but for the time that they took."""
    grids = {file.name: file.read_bytes() for file in (runs.folder / name / "samples").iterdir()}
    lines = [row["validation"] for row in log_of(runs.folder / name)]
    return grids, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.proof
def test_grids_and_validations_are_the_same_bytes_whatever_the_number_of_processes(study):
    runs: Study = study("sdxl")
    runs.finish("alone-shown", 1, gradient__accumulation=4, **SETTINGS)
    alone = shown(runs, "alone-shown")
    assert len(alone[0]) == 2  # before the first step and after it
    for ranks in (2, 4):  # of four, one has no image to draw
        runs.finish(f"shown-{ranks}", ranks, gradient__accumulation=4 // ranks, **SETTINGS)
        assert shown(runs, f"shown-{ranks}") == alone


FAILING = """
from flame_train.run.train import sample_grids as grids
whole = grids.generate_image
def generate_image(request, *rest):
    if request.number == 2:
        raise ValueError("no decoder")
    return whole(request, *rest)
grids.generate_image = generate_image
"""


def test_an_image_that_one_process_cannot_draw_costs_the_grid_and_not_the_run(study):
    runs: Study = study("sdxl")
    code, said = runs.scripted("undrawn", 2, FAILING, **SETTINGS)
    assert code == 0, said
    assert said.count("no sample grid at step 1: rank 1 failed: no decoder") == 1
    assert not list((runs.folder / "undrawn" / "samples").glob("*"))


SIGNALLED = """
import os, signal
from flame_train.run.train import sample_grids as grids
whole, drawn = grids.generate_image, []
def generate_image(request, *rest):
    drawn.append(request.number)
    if drawn.count(2) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return whole(request, *rest)
grids.generate_image = generate_image
"""


@pytest.mark.proof
def test_a_signal_to_one_process_that_draws_saves_and_ends_all_and_the_grid_is_drawn_later(study):
    runs: Study = study("sdxl")
    settings = SETTINGS | {"train__steps": 4, "sample__every": 2, "checkpoint__every": 100}
    runs.finish("undisturbed", 2, **settings)
    code, said = runs.scripted("disturbed", 2, SIGNALLED, **settings)
    assert code == 128 + signal.SIGTERM, said
    assert "after step 2, saved" in said
    assert len(shown(runs, "disturbed")[0]) == 1
    runs.finish("disturbed", 2, **settings)
    assert shown(runs, "disturbed") == shown(runs, "undisturbed")
