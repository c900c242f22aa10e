"""The command line: exit codes, what goes where, and that a user never sees a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flame_train
from flame_train import cli
from flame_train.errors import (
    ConfigError,
    DataError,
    DeviceFault,
    EnvironmentFault,
    Interrupted,
    ModelFileError,
    NonFiniteError,
    OutOfMemory,
    OutputError,
    ShapeError,
    out_of_memory,
)

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "sdxl-lora",
    "sd3-lora",
    "flux-lora",
    "quickstart",
    "init",
    "sample",
    "cache",
    "dataset",
    "inspect",
    "convert",
    "merge",
    "resize",
    "verify",
    "extract",
    "gradcheck",
    "bench",
    "doctor",
)


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flame_train", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        **options,
    )


def plant(monkeypatch: pytest.MonkeyPatch, train: Callable[..., Any]) -> None:
    """Put `train` in the place of training, so that a test says how it ends."""
    fake: Any = types.SimpleNamespace(train=lambda *arguments, **options: train(*arguments))
    monkeypatch.setitem(sys.modules, "flame_train.run.commands.stages", fake)


def raising(error: BaseException) -> Callable[..., Any]:
    def train(*arguments: Any) -> Any:
        raise error

    return train


class OutOfMemoryError(MemoryError):
    """Stands in for the GPU library's own, which is known by name and module."""


OutOfMemoryError.__module__ = "cupy.cuda.memory"
CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("the reason"), 2),
        (DataError("the reason"), 3),
        (ModelFileError("the reason"), 3),
        (EnvironmentFault("the reason"), 4),
        (DeviceFault("the reason"), 5),
        (MemoryError("the reason"), 5),
        (OutOfMemoryError("the reason"), 5),
        (CUDARuntimeError("cudaErrorMemoryAllocation: the reason"), 5),
        (OutputError("the reason"), 6),
        (OSError(errno.ENOSPC, "full", "the reason"), 6),
        (OSError(errno.EIO, "broken", "the reason"), 4),
        (NonFiniteError("the reason"), 7),
    ],
)
def test_an_error_a_user_can_meet_has_its_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    plant(monkeypatch, raising(error))
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "the reason" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_was_asked_for_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    plant(monkeypatch, raising(Interrupted(number, "stopped after step 3, saved")))
    assert cli.run(["train", "x.toml"]) == 128 + number
    assert capsys.readouterr() == ("", "stopped after step 3, saved\n")


def test_memory_that_runs_out_without_a_word_is_told_with_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, raising(MemoryError()))
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 5
    assert "error: out of memory: no more to be had; try " in capsys.readouterr().err
    with pytest.raises(OutOfMemory, match="out of memory: no more to be had; try less"), out_of_memory("try less"):
        raise MemoryError


def test_a_gpu_that_fails_is_no_bug_but_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plant(monkeypatch, raising(CUDARuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered")))
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 5
    message = capsys.readouterr().err
    assert message.startswith("error: the GPU failed: cudaErrorECCUncorrectable: uncorrectable ECC error encountered; ")
    assert "continues from its last checkpoint" in message
    (saved,) = tmp_path.iterdir()
    assert str(saved) in message
    assert "Traceback" in saved.read_text()


def test_a_keyboard_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("error", [KeyError("why"), ShapeError("why"), OSError(errno.EINVAL, "why"), OutOfMemoryError])
def test_anything_else_is_a_bug_with_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Any
) -> None:
    if error is OutOfMemoryError:
        error = type("OutOfMemoryError", (Exception,), {"__module__": "somewhere.else"})("why")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plant(monkeypatch, raising(error))
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: this is a bug in flame-train: {type(error).__name__}: ")
    assert "Traceback" not in message
    (saved,) = tmp_path.iterdir()
    assert str(saved) in message
    assert "Traceback" in saved.read_text()
    assert "why" in saved.read_text()


@pytest.mark.parametrize(("error", "code"), [(KeyError("why"), 1), (ConfigError("why"), 2)])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    plant(monkeypatch, raising(error))
    assert cli.run(["sdxl-lora", "--config", "x.toml", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_training_gets_what_the_command_line_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    plant(monkeypatch, lambda *arguments: seen.append(arguments) or {})
    line = "sdxl-lora -c - --set a.b=1 --set c.d=x --device cpu --dry-run"
    assert cli.run(line.split()) == 0
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 0
    assert cli.run(["train", "--config", "x.toml"]) == 0
    assert seen == [
        ("-", ["a.b=1", "c.d=x"], "cpu", True, "sdxl"),
        ("x.toml", [], "cuda", False, "sdxl"),
        ("x.toml", [], "cuda", False, None),
    ]


def test_a_result_is_lines_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"lora": Path("run/lora.safetensors"), "steps": 3, "buckets": {"64x64": 2}, "seen": [1, 2]}
    plant(monkeypatch, lambda *arguments: result)
    assert cli.run(["sdxl-lora", "--config", "x.toml"]) == 0
    assert capsys.readouterr().out == ("lora: run/lora.safetensors\nsteps: 3\nbuckets:\n  64x64: 2\nseen:\n  1\n  2\n")
    assert cli.run(["sdxl-lora", "--config", "x.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**result, "lora": "run/lora.safetensors"}


def test_bench_alone_times_the_smallest_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["resolution"], found["device"]) == ("sdxl-tiny", 64, "cpu")
    assert found["eager_ms"] > 0


@pytest.mark.parametrize("command", ["bench", "gradcheck"])
def test_alone_without_a_gpu_each_says_in_a_line_what_to_add(
    capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.run([command]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cpu" in line


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "sdxl-lora",
        "sdxl-lora --config x.toml --device tpu",
        "sdxl-lora --config x.toml --nonsense",
        "convert a b",
        "convert a b --to other",
        "sample --checkpoint x",
        "bench nonsense",
        "gradcheck --dtype int8",
    ],
)
def test_a_wrong_command_line_is_2_without_a_traceback(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert cli.run(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r"error: .*; see flame-train.* --help\n$|\n? *Usage", captured.err)
    assert "Input should" not in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "init sdxl --card big",
            "error: --card: expected the memory of a GPU in GB, such as 12 or 12GB, got 'big'; see ",
        ),
        ("sample -m x -p a --steps x", "error: --steps: expected a whole number; see flame-train sample --help"),
        ("sample -m x -p a --steps -1", "error: --steps: expected a number greater than or equal to 0; see "),
        ("train a b", "error: got unexpected extra argument b; see flame-train train --help"),
        ("train --config", "error: --config: requires an argument; see "),
        ("train --foo", "error: no such option: --foo; see flame-train train --help"),
        ("nosuch", "error: no such command 'nosuch'; see flame-train --help"),
    ],
)
def test_usage_errors_have_the_shape_of_all_errors(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert cli.run(line.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(said)


@pytest.mark.parametrize(("no_color", "drawn"), [("", "\x1b[1;31merror:\x1b[0m no such"), ("1", "error: no such")])
def test_an_error_has_colour_on_a_terminal_but_for_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str, drawn: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert cli.run(["nosuch"]) == 2
    assert screen.getvalue().startswith(drawn)


def test_flags_show_no_type_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--help"], ["train", "--help"], ["bench", "--help"], ["show", "--help"]):
        assert cli.run(line) == 0
        assert "<bool>" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [*(c for c in COMMANDS if c != "bench"), "bench step", "bench ops", "bench memory"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: flame-train " + command in text
    assert "--debug" in text


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from flame_train import cli; code = cli.run(['--help']);"
        "heavy = {'numpy', 'pydantic', 'PIL', 'tokenizers', 'cupy', 'torch', 'ruamel', 'huggingface_hub'};"
        "print('loaded:', sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("loaded: [] 0\n")
    for command in COMMANDS:
        assert f"│ {command} " in done.stdout


def test_a_library_that_says_its_warnings_itself_is_heard_once() -> None:
    code = (
        "import logging, sys; from flame_train import cli;"
        "own = logging.getLogger('own'); own.addHandler(logging.StreamHandler());"
        "sys.argv[1:] = ['--version'];"
        "cli.sys.exit = lambda code: None; cli.main();"
        "own.warning('of its own'); logging.getLogger('other').warning('of no one');"
        "logging.getLogger('flame_train.x').info('of ours')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.splitlines() == ["of its own", "of no one", "of ours"]


def test_the_version_is_the_package_s() -> None:
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"flame-train {flame_train.__version__}\n")


def test_a_reader_that_stops_reading_is_no_error() -> None:
    """`flame-train doctor | true`: the pipe is closed before the first byte."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "flame_train", "doctor", "--device", "cpu"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "environment",
    [{"LANG": "C", "LC_ALL": "C"}, {"TERM": "dumb", "COLUMNS": "20"}, {"PYTHONIOENCODING": "ascii:strict"}],
)
def test_poor_terminals_get_plain_output(environment: dict[str, str]) -> None:
    done = program("doctor", "--device", "cpu", env={**os.environ, "PYTHONUTF8": "0", **environment})
    assert done.returncode == 0
    assert done.stdout.startswith("cpu: can train here\n")
    assert "\x1b" not in done.stdout
    assert program("--help", env={**os.environ, "PYTHONUTF8": "0", **environment}).returncode == 0


def test_doctor_is_4_where_the_asked_device_is_unusable_and_json_on_request() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = program("doctor", "--json", env=hidden)
    assert done.returncode == 4
    assert json.loads(done.stdout)["usable"] is False
    assert program("doctor", "--device", "cpu", env=hidden).returncode == 0


@pytest.mark.parametrize(
    "line",
    [
        "sdxl-lora -c a.toml -c b.toml",
        "sdxl-lora --config a.toml -c b.toml",
        "sample -m x -p y --steps 1 --steps 2",
        "convert a b --to kohya --to diffusers",
        "bench step --deterministic --not-deterministic",
        "gradcheck add --device cpu --device cuda",
    ],
)
def test_an_option_of_one_value_is_not_taken_from_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    plant(monkeypatch, lambda *arguments: {})
    assert cli.run(line.split()) == 2
    assert "takes one value, and was given 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [["inspect", ""], ["convert", "a", "", "--to", "kohya"], ["sample", "-m", "x", "-p", "y", "--lora="]]
)
def test_an_empty_path_is_not_the_folder_one_is_in(capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    assert cli.run(line) == 2
    assert "expected a path, got an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect LONG.safetensors", 3),
        ("convert LONG.safetensors there.safetensors --to kohya --force", 3),
        ("convert gone.safetensors there.safetensors --to kohya --force", 3),
        ("convert a.safetensors LONG.safetensors --to kohya", 6),
        ("merge LONG.safetensors b.safetensors there.safetensors --force", 3),
        ("merge a.safetensors b.safetensors LONG.safetensors", 6),
        ("sample -m LONG.safetensors -p x --device cpu", 3),
        ("sample -m a.safetensors -p x --device cpu -o LONG.png", 6),
        ("init sdxl -o LONG.toml", 6),
        ("quickstart LONG --device cpu", 6),
        ("sdxl-lora --device cpu -c LONG.toml", 2),
    ],
)
def test_what_cannot_even_be_looked_at_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, code: int
) -> None:
    """A name that is too long stands for a folder that may not be entered, which there is none of for root."""
    monkeypatch.chdir(tmp_path)
    Path("there.safetensors").touch()
    assert cli.run(line.replace("LONG", "a" * 300).split()) == code
    assert "bug" not in capsys.readouterr().err


def test_a_folder_that_was_removed_meanwhile_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.run(["sdxl-lora", "--config", "x.toml", "--device", "cpu"]) == 6
    assert "the folder that this was started in is gone" in capsys.readouterr().err


def test_what_may_be_said_again_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda *arguments: {})
    assert cli.run(["sdxl-lora", "-c", "a.toml", "--set", "a.b=1", "--set", "a.b=2", "--json", "--json"]) == 0


def test_a_strength_without_a_lora_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sample", "-m", "x", "-p", "y", "--strength", "0.5", "--device", "cpu"]) == 2
    assert "--lora" in capsys.readouterr().err


def test_a_tilde_is_the_users_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for line in ("inspect ~/gone.safetensors", "merge ~/gone.safetensors a o.safetensors"):
        assert cli.run(line.split()) == 3
        assert str(tmp_path / "gone.safetensors") in capsys.readouterr().err


def test_json_is_strict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, lambda *arguments: {"loss": float("nan"), "all": [{"x": float("-inf")}, 1.5]})
    assert cli.run(["sdxl-lora", "--config", "x.toml", "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"loss": None, "all": [{"x": None}, 1.5]}


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_nobody_listening_is_no_error(closed: str) -> None:
    line = f'"{sys.executable}" -m flame_train doctor --device cpu {closed}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("given", [["my.toml"], ["--config", "my.toml"], ["-c", "my.toml"]])
@pytest.mark.parametrize("name", ["train", "sdxl-lora"])
def test_a_config_is_an_argument_or_an_option(monkeypatch: pytest.MonkeyPatch, name: str, given: list[str]) -> None:
    asked: list[Any] = []
    plant(monkeypatch, lambda *arguments: asked.append(arguments) or {})
    assert cli.run([name, *given]) == 0
    assert asked[0][:2] == ("my.toml", [])


def test_two_configs_or_none_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, lambda *arguments: {})
    assert cli.run(["train", "a.toml", "--config", "b.toml"]) == 2
    assert "expected one config, got a.toml and --config b.toml" in capsys.readouterr().err
    assert cli.run(["train"]) == 2
    assert "expected a config: flame-train train FILE" in capsys.readouterr().err


def test_short_options_are_keys_of_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    plant(monkeypatch, lambda *arguments: asked.append(arguments[1]) or {})
    short = ["--steps", "5", "--lr", "1e-3", "--rank", "4", "-o", str(tmp_path)]
    assert cli.run(["train", "a.toml", "--set", "train.seed=3", *short]) == 0
    assert asked == [["train.seed=3", "train.steps=5", "optimizer.lr=1e-3", "lora.rank=4", f"output.dir={tmp_path}"]]


def test_a_key_given_twice_over_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, lambda *arguments: {})
    assert cli.run(["train", "a.toml", "--steps", "5", "--set", "train.steps=6"]) == 2
    assert "train.steps was given twice" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("sdxl", "sdxl-lora"), ("smaple", "sample")])
def test_an_unknown_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert cli.run([typed]) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("begun", "expected"),
    [("init s", {"sdxl", "sd3"}), ("train a.toml --set optimizer.l", {"optimizer.lr="})],
)
def test_families_and_keys_are_completed(begun: str, expected: set[str]) -> None:
    asked = {"_FLAME_TRAIN_COMPLETE": "complete_bash", "COMP_WORDS": f"flame-train {begun}"}
    asked["COMP_CWORD"] = str(len(asked["COMP_WORDS"].split()) - 1)
    code = "from flame_train.cli import app; app(prog_name='flame-train')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **asked}, check=False
    )
    assert set(done.stdout.split()) >= expected
    assert all(line.startswith(begun.rsplit(maxsplit=1)[-1]) for line in done.stdout.split())
