"""Failpoints act only where a test has armed them: a program that is used cannot be made to die by its environment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flame_train
from flame_train.disk import failpoint


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def test_an_armed_place_acts_at_its_nth_hit_and_no_other() -> None:
    failpoint.arm("here:2:enospc,there:all:nan")
    values = np.zeros((2, 2))
    failpoint.fail_point("here")
    failpoint.fail_point("elsewhere")
    with pytest.raises(OSError, match="failpoint here") as caught:
        failpoint.fail_point("here")
    assert caught.value.errno == errno.ENOSPC
    failpoint.fail_point("here")
    failpoint.inject_nan("there", values)
    assert np.isnan(values[0, 0])
    assert np.isfinite(values).sum() == 3
    failpoint.fail_point("there")  # a number that goes bad is nothing that a plain place can do


@pytest.mark.parametrize("junk", ["here:sometimes", "here:1:boom", "here:-1", "here:\u00b2"])
def test_junk_is_told_to_the_test_that_armed_it(junk: str) -> None:
    with pytest.raises(ValueError, match="a failpoint is"):
        failpoint.arm(junk)


def test_nothing_in_the_package_arms_a_place_or_reads_a_variable_for_it() -> None:
    package = Path(flame_train.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py") if path.name != "failpoint.py"}
    assert not [path for path, text in sources.items() if "failpoint.arm" in text or "import arm" in text]
    assert "environ" not in (package / "disk" / "failpoint.py").read_text().replace("environment", "")


@pytest.mark.parametrize("value", ["here", "here:1:boom", "\u00b2:\u00b2"])
def test_the_environment_arms_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setitem(os.environ, "FLAME_TEST_FAILPOINT", value)
    failpoint.fail_point("here")
