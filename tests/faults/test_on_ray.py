"""A sweep by Ray with three workers, one of which is killed: all runs end well."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.proof,
]


def test_a_killed_worker_costs_no_run(tmp_path: Path, job: Any) -> None:
    pytest.importorskip("ray")
    job.arguments("train", train__steps=20, checkpoint__every=5)
    path = tmp_path / "sweep.toml"
    seeds = list(range(12))
    path.write_text(f'config = "config.toml"\nfolder = "{tmp_path}/runs"\n[grid]\n"train.seed" = {seeds}\n')
    code = (
        "import os, sys, ray\n"
        "ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)\n"
        "from flame_train.cli import run\n"
        f"sys.exit(run(['sweep', {str(path)!r}, '--where', 'ray', '--device', 'cpu', '--json']))\n"
    )
    process = job.program.start_python("-c", code)
    try:
        killed = _kill_one(process.pid, tmp_path / "runs")
        out, error = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, error
    report = json.loads(out[out.index("{") :])
    assert report["done"] == "12 of 12"
    assert killed in {run["run"] for run in report["runs"]}
    assert all(run["step"] == "20/20" for run in report["runs"])


def _kill_one(driver: int, runs: Path) -> str:
    """Kills the process of the first run that has a checkpoint and is not done; the run's name."""
    waiting = threading.Event()
    while psutil.pid_exists(driver):
        for status in runs.glob("*/status.json"):
            found = json.loads(status.read_text())
            if found["state"] == "running" and found["saved"] >= 5:
                os.kill(found["pid"], signal.SIGKILL)
                return status.parent.name
        waiting.wait(0.01)
    raise AssertionError("no run had a checkpoint")
