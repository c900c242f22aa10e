"""Processes killed by SIGKILL at random moments, loading included; the run goes on to the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ENVIRON, Study

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_continue.py"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ranks", "kills", "steps"),
    [
        pytest.param(4, 1, 6, marks=pytest.mark.proof),
        pytest.param(2, 30, 20, marks=pytest.mark.proof),
        pytest.param(4, 12, 12, marks=pytest.mark.proof),
    ],
)
def test_a_killed_process_ends_all_and_the_run_goes_on_to_the_same_bytes(study, tmp_path, ranks, kills, steps):
    runs: Study = study("sdxl")
    runs.command("as-it-is")
    (config,) = runs.folder.glob("as-it-is-*.toml")
    (tmp_path / "quickstart").mkdir()
    config.rename(tmp_path / "quickstart" / "config.toml")
    asked = [f"--ranks={ranks}", f"--kills={kills}", f"--steps={steps}", "--device=cpu", "optimizer.name=adamw"]
    ended = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "quickstart", tmp_path / "runs", *asked],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRON,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{kills} kills, all the same" in ended.stdout
