"""The means of a run over its last steps."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.training.log import REMEMBERED, Meter


def test_the_mean_is_exponential_and_goes_on_where_a_run_is_continued() -> None:
    losses = np.random.default_rng(0).uniform(0.1, 2.0, 1000).tolist()
    whole, continued = Meter(), Meter(losses[600 - REMEMBERED : 600])
    for loss in losses:
        whole.add(loss, 0.5)
    for loss in losses[600:]:
        continued.add(loss, 0.5)
    weights = 0.95 ** np.arange(1000)[::-1]
    expected = (weights * losses).sum() / weights.sum()
    assert whole.loss == pytest.approx(expected, rel=1e-4)
    assert continued.loss == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.parametrize(("seconds", "pace"), [(0.5, "2.00 it/s"), (1.0, "1.00 it/s"), (2.5, "2.50 s/it")])
def test_the_pace_is_what_reads_well(seconds: float, pace: str) -> None:
    meter = Meter()
    assert (meter.pace, meter.figures()) == ("", {"mean_loss": None, "steps_per_s": None})
    meter.add(1.0, seconds)
    assert meter.pace == pace
    assert meter.figures()["steps_per_s"] == pytest.approx(1 / seconds)
