"""Many runs over one config: their names, what is refused, and a run that fails and ends no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.errors import ConfigError
from flame_train.show.library import runs_in
from flame_train.sweep.on_slurm import script
from flame_train.sweep.plan import read_sweep


def write(folder: Path, text: str, job: Any) -> Path:
    job.arguments("train")  # writes the config
    path = folder / "sweep.toml"
    path.write_text(f'config = "config.toml"\nfolder = "{folder}/runs"\n{text}')
    return path


def test_runs_are_named_by_what_differs(tmp_path: Path, job: Any) -> None:
    grid = '[grid]\noptimizer.lr = [1e-4, 5e-5]\n"lora.rank" = [2, 4]\n"train.seed" = [1]\n'
    sweep = read_sweep(write(tmp_path, grid, job))
    assert [run.name for run in sweep.runs] == [
        "lr-0.0001_rank-2",
        "lr-0.0001_rank-4",
        "lr-5e-05_rank-2",
        "lr-5e-05_rank-4",
    ]
    assert {run.config.train.seed for run in sweep.runs} == {1}
    assert [run.folder.parent for run in sweep.runs] == [tmp_path / "runs"] * 4
    listed = 'remote = "s3://bucket/x"\n[[runs]]\nname = "wide"\nlora.rank = 8\n[[runs]]\nlora.targets = ["a", "b"]\n'
    wide, other = read_sweep(write(tmp_path, listed, job)).runs
    assert (wide.name, wide.config.lora.rank, wide.config.output.remote) == ("wide", 8, "s3://bucket/x/wide")
    assert (other.name, other.config.lora.targets) == ("targets-a-b", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a table [grid] or tables [[runs]], got neither"),
        ('[grid]\n"lora.rank" = 2\n', "grid.lora.rank: expected a list of values"),
        ('[grid]\n"lora.rnk" = [2]\n', "grid: lora.rnk: unknown key"),
        ('[grid]\n"output.dir" = ["x"]\n', "output.dir: folder and remote say where a run is; remove it"),
        ('[grid]\n"lora.rank" = [2, 0]\n', "rank-0: --set: lora.rank: expected an integer from 1 to 4096, got 0"),
        ('[[runs]]\nname = "../x"\n', "runs 1: name: expected letters, digits"),
        ('[[runs]]\nname = "x"\n[[runs]]\nname = "x"\n', "two runs are called x"),
        ('what = 1\n[grid]\n"lora.rank" = [2]\n', "what: unknown key"),
        (
            'remote = "s3://a:hidden@b/c"\n[grid]\n"lora.rank" = [2]\n',
            "remote: expected an address without credentials",
        ),
        ('slurm = ["rm -rf"]\n[grid]\n"lora.rank" = [2]\n', "slurm: expected a list of options"),
    ],
)
def test_what_is_wrong_is_told_before_a_run_begins(tmp_path: Path, job: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_sweep(write(tmp_path, text, job))
    assert message in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_a_failed_run_ends_no_other_and_the_same_command_goes_on(tmp_path: Path, job: Any) -> None:
    path = write(tmp_path, '[[runs]]\nname = "bad"\nlora.targets = ["none.*"]\n[[runs]]\nname = "good"\n', job)
    ended = job.program("sweep", str(path), "--device", "cpu", "--json")
    assert ended.code == 2
    bad, good = json.loads(ended.stdout)["runs"]
    assert (bad["state"], good["state"], good["step"]) == ("not begun", "done", "5/5")
    assert "bad: ended with 2 error: " in ended.stderr
    assert "lora.targets" in ended.stderr
    log = (tmp_path / "runs" / "good" / "log.jsonl").stat().st_mtime_ns
    path = write(tmp_path, '[[runs]]\nname = "bad"\n[[runs]]\nname = "good"\n', job)
    ended = job.program("sweep", str(path), "--device", "cpu", "--json")
    assert ended.code == 0, ended.stderr
    assert [run["state"] for run in json.loads(ended.stdout)["runs"]] == ["done", "done"]
    assert (tmp_path / "runs" / "good" / "log.jsonl").stat().st_mtime_ns == log
    shown = job.program("sweep", str(path), "--status", "--json")
    assert json.loads(shown.stdout)["done"] == "2 of 2"
    assert json.loads(shown.stdout)["compare"] == f"flame-train show {tmp_path}/runs"
    assert [found.name for found in runs_in(tmp_path / "runs")] == ["bad", "good"]  # what that command shows


def test_the_script_for_slurm_can_be_read(tmp_path: Path, job: Any) -> None:
    path = write(tmp_path, 'slurm = ["--partition=gpu"]\n[grid]\n"lora.rank" = [2, 4, 8]\n', job)
    text = script(read_sweep(path), "cuda")
    for line in ("--array=0-2", "--requeue", "--signal=USR1@60", "--gpus=1", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in text
    assert f'sweep {path} --only "$SLURM_ARRAY_TASK_ID" --device cuda' in text
    only = job.program("sweep", str(path), "--only", "3", "--device", "cpu")
    assert only.code == 2
    assert "--only: expected a number from 0 to 2, got 3" in only.complaint
