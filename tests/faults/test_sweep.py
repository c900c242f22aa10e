"""Many runs over one config: their names, what is refused, and a run that fails and ends no other."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from flame_train.commands.output import show
from flame_train.config.render import toml_value
from flame_train.errors import ConfigError, OutputError
from flame_train.show.library import runs_in
from flame_train.sweep.many_runs import sweep
from flame_train.sweep.runners import run_here, script
from flame_train.sweep.sweep_file import read_sweep
from flame_train.training.session import StopRequest


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
        ('[grid]\n"optimizer.lr" = [1979-05-27]\n', "optimizer.lr: expected a number > 0 and <= 10, got the date"),
        ('[grid]\n"lora.rank" = [2]\n[grid.a.b.c.d.e.f.g.h.i]\n', "8 parts of a key"),
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
    assert (bad["state"], good["state"], good["step"]) == ("pending", "done", "5/5")
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


@pytest.mark.parametrize("text", ["a\ntouch PWNED\n", "a\rb", "a\x1b[2J"])
def test_no_text_of_a_sweep_becomes_a_line_of_the_script(tmp_path: Path, job: Any, text: str) -> None:
    grid = '[grid]\n"lora.rank" = [2]\n'
    with pytest.raises(ConfigError, match=r"sweep\.toml:3: slurm: "):
        read_sweep(write(tmp_path, f"slurm = [{toml_value('--time=1' + text)}]\n{grid}", job))
    path = write(tmp_path, grid, job)
    named = path.rename(path.with_name(f"x{text}.toml"))
    with pytest.raises(ConfigError, match="a line for Slurm"):
        script(read_sweep(named), "cpu")
    path.write_text(f'config = "config.toml"\nfolder = {toml_value("runs/" + text)}\n{grid}')
    with pytest.raises(ConfigError, match=r"sweep\.toml:2: folder: "):
        read_sweep(path)


def test_names_are_quoted_in_the_script_as_sbatch_and_the_shell_read_them(tmp_path: Path, job: Any) -> None:
    path = write(tmp_path, '[grid]\n"lora.rank" = [2]\n', job).rename(tmp_path / "two words # 'x'.toml")
    path.write_text(path.read_text().replace("/runs", "/my 100% runs"))
    lines = script(read_sweep(path), "cpu").splitlines()
    options = {line.split(" ", 1)[1].split("=")[0]: line.split(" ", 1)[1] for line in lines if "#SBATCH" in line}
    assert shlex.split(options["--job-name"]) == ["--job-name=two words # 'x'"]
    assert shlex.split(options["--output"]) == [f"--output={tmp_path}/my 100%% runs/slurm-%A_%a.txt"]
    (command,) = (line for line in lines if line.startswith("srun "))
    assert shlex.split(command)[5] == str(path)


def test_what_lies_behind_a_link_beside_a_run_is_left_alone(tmp_path: Path, job: Any) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "runs").mkdir()
    linked = "expected a plain file, found a link"
    for name, make, said in (("a", lambda at: at.symlink_to(theirs), linked), ("b", os.mkfifo, "")):
        make(tmp_path / "runs" / f"{name}.output.txt")
        path = write(tmp_path, f'[[runs]]\nname = "{name}"\n', job)
        with pytest.raises(OutputError, match=rf"{name}\.output\.txt: .*{said}"):
            run_here("", read_sweep(path).runs, ["cpu"], StopRequest(), print)
    assert theirs.read_text() == "precious"


WILD = ("null", "[]", '"x"', "true", "1e999", "1" + "0" * 400, "9" * 9000, "[" * 60_000, '{"\\ud800": 1}')


@pytest.mark.parametrize("value", WILD)
def test_the_table_is_shown_whatever_stands_in_the_folders(tmp_path: Path, job: Any, value: str) -> None:
    path = write(tmp_path, '[[runs]]\nname = "a"\n[[runs]]\nname = "b"\n', job)
    first, second = (tmp_path / "runs" / name for name in "ab")
    first.mkdir(parents=True)
    second.mkdir()
    told = f'{{"state": "done", "step": {value}, "exit_code": {value}, "host": {value}, "pid": {value}}}'
    (first / "status.json").write_text(told)
    (second / "status.json").write_text(f'{{"state": {value}}}')
    (first / "log.jsonl").write_text(f'{{"step": 1, "loss": {value}}}\n{value}\n{{"step": 2, "loss": 0.5}}\n')
    os.mkfifo(second / "log.jsonl")
    result, code = sweep(path, "here", ["cpu"], True)
    assert code == 0
    assert [row["run"] for row in result["runs"]] == ["a", "b"]
    assert result["runs"][0]["mean_loss"] == 0.5 or value == "true"


def test_the_table_has_what_differs_and_the_best_validation_comes_first(tmp_path: Path, job: Any, capsys: Any) -> None:
    grid = '[grid]\n"lora.rank" = [2, 4, 8]\n"optimizer.lr" = [1e-4]\n"train.steps" = [5]\n'
    path = write(tmp_path, grid, job)
    for rank, best in ((2, 2.12345), (8, 2.1)):
        folder = tmp_path / "runs" / f"rank-{rank}"
        folder.mkdir(parents=True)
        lines = [{"step": 2, "loss": 1.0, "validation": {"loss": best, "best": {"step": 2, "loss": best}}}]
        lines += [{"step": 3, "loss": 3.0, "validation": {"loss": 9.0, "best": {"step": 2, "loss": best}}}]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, _ = sweep(path, "here", ["cpu"], True)
    told = [(row["rank"], row["best_validation"], row["at_step"], row["mean_loss"]) for row in result["runs"]]
    assert told == [(8, 2.1, 2, 2.0), (2, 2.12345, 2, 2.0), (4, None, None, None)]
    assert "lr" not in result["runs"][0]
    show(result, False)
    assert "2.123" in capsys.readouterr().out


def test_a_grid_is_counted_before_it_is_made(tmp_path: Path, job: Any) -> None:
    axes = ("lora.rank", "train.steps", "train.seed", "optimizer.lr")
    grid = "[grid]\n" + "".join(f'"{axis}" = {list(range(1, 200))}\n' for axis in axes)
    with pytest.raises(ConfigError, match=f"grid: expected at most 10000 combinations, got {199**4}"):
        read_sweep(write(tmp_path, grid, job))


def test_the_script_for_slurm_can_be_read(tmp_path: Path, job: Any) -> None:
    path = write(tmp_path, 'slurm = ["--partition=gpu"]\n[grid]\n"lora.rank" = [2, 4, 8]\n', job)
    text = script(read_sweep(path), "cuda")
    for line in ("--array=0-2", "--requeue", "--signal=USR1@60", "--gpus=1", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in text
    assert f'sweep {path} --only "$SLURM_ARRAY_TASK_ID" --device cuda' in text
    only = job.program("sweep", str(path), "--only", "3", "--device", "cpu")
    assert only.code == 2
    assert "--only: expected a number from 0 to 2, got 3" in only.complaint
