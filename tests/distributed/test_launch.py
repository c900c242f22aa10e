"""`--gpus N` is mpirun's command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from flame_train.cli import run
from flame_train.distributed import launch
from flame_train.distributed.launch import command_of, start_again, without_gpus
from flame_train.errors import ConfigError

from .conftest import ENVIRON, Study
from .test_ranks import processes_of, saved, wait_for

ASKED = ["train", "--config", "my.toml", "--gpus", "4", "--set", "train.steps=3"]
LEFT = ["train", "--config", "my.toml", "--set", "train.steps=3"]


def test_the_processes_get_the_command_without_the_option():
    assert without_gpus(ASKED) == LEFT
    assert without_gpus(["train", "--gpus=4", "--config", "my.toml"]) == ["train", "--config", "my.toml"]


def test_open_mpi_is_told_not_to_bind_and_that_root_may():
    mine = command_of("/usr/bin/mpirun", 4, LEFT, open_mpi=True, as_root=True)
    assert mine[:3] == ["/usr/bin/mpirun", "-n", "4"]
    assert {"--bind-to", "--oversubscribe", "--allow-run-as-root"} <= set(mine)
    assert mine[-6:] == [sys.executable, *LEFT]
    assert command_of("mpirun", 2, LEFT, open_mpi=False, as_root=True) == ["mpirun", "-n", "2", sys.executable, *LEFT]


@pytest.mark.parametrize("command", [["train", "--config", "my.toml"], ["bench", "step", "--model", "sdxl"]])
def test_a_command_is_started_anew_without_the_option(monkeypatch, command):
    started = []
    monkeypatch.setattr(launch.shutil, "which", lambda *_, **__: "mpirun")
    monkeypatch.setattr(launch, "_is_open_mpi", lambda _: False)
    monkeypatch.setattr(launch, "watched", lambda line: started.append(line) or 7)
    monkeypatch.setattr(sys, "argv", ["flame-train", *command, "--gpus", "3", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        sys.exit(run(sys.argv[1:]))
    assert ended.value.code == 7
    assert started == [["mpirun", "-n", "3", sys.executable, "-m", "flame_train", *command, "--device", "cpu"]]


def test_where_no_script_runs_none_is_started(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="it starts the script anew, and none runs here"):
        start_again(2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ConfigError, match="a launcher started 3 processes"):
        start_again(2)
    start_again(3)


def test_a_dry_run_plans_for_all_and_starts_none(study):
    runs: Study = study("sdxl")
    command = [*runs.command("planned", train__steps=12), "--dry-run", "--json"]
    told = [subprocess.run([*command, "--gpus", n], capture_output=True, text=True, check=True).stdout for n in "13"]
    one, three = map(json.loads, told)
    assert three["processes"] == 3
    assert three["epochs"] == 3 * one["epochs"]
    assert three["predicted_memory_gib"] == pytest.approx(one["predicted_memory_gib"], abs=0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.proof)])
def test_a_signal_saves_and_ends_all(study, number):
    runs: Study = study("sdxl")
    process = launched(runs, f"launched-{number}")
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number, said
    assert json.loads((runs.folder / f"launched-{number}" / "status.json").read_text())["state"] == "interrupted"
    assert saved(runs.folder / f"launched-{number}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_nothing_goes_on_when_it_is_killed(study):
    runs: Study = study("sdxl")
    process = launched(runs, "orphaned")
    ranks = [psutil.Process(pid) for pid in processes_of(process.pid) if pid != process.pid]
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    process.communicate()
    assert ranks
    assert not alive


def launched(runs: Study, name: str) -> subprocess.Popen[str]:
    """Two processes by `--gpus`, after their first step."""
    command = [*runs.cold().command(name, train__steps=4000, checkpoint__every=100_000), "--gpus", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON)
    log = runs.folder / name / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0, process)
    return process
