"""scripts/test_gpu.sh and test_gpus.sh run every part, with one that fails too; status and last lines say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_gpu.sh"
PARTS = (
    "doctor",
    "tests",
    "gradients",
    "quickstart-sdxl",
    "quickstart-sd3",
    "quickstart-flux",
    "killed-and-continued",
    "predicted-memory",
)


SEVERAL = SCRIPT.with_name("test_gpus.sh")
PARTS_OF_SEVERAL = {*"quickstart tests equal killed scaling streamed first one-rank bf16".split()}


def run(
    tmp_path: Path, fails: str, memory: int = 80, script: Path = SCRIPT, after: float = 0.02
) -> subprocess.CompletedProcess[str]:
    """The script with a program in Python's place that notes its arguments and fails where they hold `fails`.

    Its quickstart says a held-out loss of 0.06 before and `after` after training.
    """
    python = tmp_path / "python"
    result = f'{{"held_out_loss": {{"new": {{"before": 0.06, "after": {after}}}}}}}'
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n'
        f'case "$1$2" in -c*held_out_loss*) exec {sys.executable} "$@";; -c*) echo {memory}; exit 0;; esac\n'
        f"case \"$*\" in *{fails}*) echo broken; exit 1;; *quickstart*--json*) echo '{result}'; exit 0;; esac\n"
        "echo well\n"
    )
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python)}
    return subprocess.run([script, tmp_path / "out"], env=env, capture_output=True, text=True, check=False)


def told(done: subprocess.CompletedProcess[str], verdict: str) -> list[str]:
    return [line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith(verdict)]


def test_all_parts_run_and_pass(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing-of-this-name")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told(done, "passed") == list(PARTS)
    asked = (tmp_path / "asked").read_text()
    assert "-m pytest -q -n 8 tests/gpu" in asked
    assert "gradcheck --device cuda" in asked


@pytest.mark.parametrize(("fails", "part"), [("tests/gpu", "tests"), ("gradcheck", "gradients")])
def test_a_part_that_fails_is_named_and_the_rest_runs(tmp_path: Path, fails: str, part: str) -> None:
    done = run(tmp_path, fails)
    assert done.returncode == 1
    assert told(done, "FAILED") == [part]
    assert told(done, "passed") == [name for name in PARTS if name != part]
    assert f"failed: {part}" in done.stdout


def test_a_quickstart_that_learnt_nothing_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing-of-this-name", after=0.06)
    assert done.returncode == 1
    assert told(done, "FAILED") == ["quickstart-sdxl", "quickstart-sd3", "quickstart-flux"]


def test_nothing_runs_where_doctor_says_no(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor")
    assert done.returncode == 4
    assert told(done, "FAILED") == ["doctor"]
    assert told(done, "passed") == []
    assert "broken" in done.stdout


def test_a_small_card_leaves_out_the_large_steps_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing-of-this-name", memory=15)
    assert done.returncode == 0
    assert "not run: predicted-memory" in done.stdout
    assert told(done, "passed") == list(PARTS[:-1])


def test_all_parts_for_several_gpus_run_whatever_one_says(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing-of-this-name", script=SEVERAL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(told(done, "passed")) == PARTS_OF_SEVERAL
    failing = run(tmp_path, "equal_ranks", script=SEVERAL)
    assert failing.returncode == 1
    assert told(failing, "FAILED") == ["equal"]
    assert set(told(failing, "passed")) == PARTS_OF_SEVERAL - {"equal"}
    assert "failed: equal" in failing.stdout
    asked = (tmp_path / "asked").read_text()
    assert "torch.distributed.run --nproc-per-node 2 scripts/scaling.py --torch --steps sdxl:1 sdxl:4" in asked
