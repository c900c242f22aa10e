"""The program on a system that lacks what POSIX has beyond Windows: the same results, and the same promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Ended, Job, Program

HERE = Path(__file__).parent
WITHOUT = str(HERE / "without_posix.py")
ARMED = str(HERE / "armed.py")
TOY = str(HERE.parent / "io" / "toy_run.py")

HOLDER = """
import sys
import threading
from pathlib import Path
from flame_train.io.runfolder import RunFolder
with RunFolder(Path(sys.argv[1]), "toy = true\\n", lambda old, found: None) as run:
    print("held", flush=True)
    threading.Event().wait()
"""
STATE = """
import sys
from pathlib import Path
from flame_train.io.runlog import state_of
print(state_of(Path(sys.argv[1]))["state"])
"""


def run(program: Program, *arguments: str) -> Ended:
    """A command to its end, on such a system."""
    process = program.start_python(WITHOUT, *arguments)
    out, err = process.communicate()
    return Ended(process.returncode, 0.0, out, err)


def memory_in(report: str) -> str:
    """The machine's memory as `doctor` found it."""
    (found,) = [line["found"] for line in json.loads(report)["lines"] if line["name"] == "memory"]
    return str(found)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """script(text): the arguments that run it on such a system."""

    def written(text: str) -> tuple[str, str]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return "--script", str(path)

    return written


def test_the_system_lacks_them(program: Program, script: Callable[[str], tuple[str, str]], tmp_path: Path) -> None:
    """What the other tests of this file rest upon."""
    for text in ("import fcntl", "import pwd", "import resource", "import termios", "import os\nos.O_NOFOLLOW"):
        assert run(program, *script(text)).code == 1, text
    folder = f"import os\nos.open({str(tmp_path)!r}, os.O_RDONLY)"
    assert "Permission denied" in run(program, *script(folder)).stderr


def test_a_run_and_its_continuation_give_the_same_bytes_as_on_posix(
    program: Program, new_job: Job, another: Callable[..., Job]
) -> None:
    arguments = new_job.arguments("sdxl-lora", train__steps=4)
    stopped = run(program, "--script", ARMED, "log.append:2:term", *arguments)
    assert (stopped.code, new_job.status()["state"]) == (143, "interrupted"), stopped.stderr
    assert new_job.steps() == [2]
    continued = run(program, *arguments)
    assert continued.code == 0, continued.stderr
    assert new_job.debris() == []
    assert run(program, "inspect", str(new_job.out / "lora.safetensors")).code == 0
    on_posix = another("posix", train__steps=4)
    assert new_job.result() == on_posix.finish()


def test_commands_work(program: Program, new_job: Job, world: Path, tmp_path: Path) -> None:
    machine, on_posix = run(program, "doctor", "--json"), program("doctor", "--json")
    assert (machine.code, memory_in(machine.stdout)) == (on_posix.code, memory_in(on_posix.stdout)), machine.stderr
    cached = run(program, *new_job.arguments("cache"))
    assert cached.code == 0, cached.stderr
    planned = run(program, *new_job.arguments("sdxl-lora"), "--dry-run", "--json")
    assert planned.code == 0, planned.stderr
    found = run(program, "inspect", str(world / "base.safetensors"), "--json")
    assert (found.code, json.loads(found.stdout)["identity"]["family"]) == (0, "sdxl"), found.stderr
    made = run(program, "init", "sdxl", "-o", str(tmp_path / "made.toml"))
    assert made.code == 0, made.stderr


@pytest.mark.parametrize(
    "point",
    [
        "file.mid_write",
        "file.before_rename",
        "checkpoint.mid_file:3",
        "checkpoint.before_rename:2",
        "checkpoint.mid_prune",
    ],
)
def test_a_run_that_is_killed_continues_to_the_same_bytes(program: Program, tmp_path: Path, point: str) -> None:
    killed = run(program, "--script", TOY, str(tmp_path / "run"), point)
    assert killed.code < 0, killed.stderr
    continued = run(program, "--script", TOY, str(tmp_path / "run"))
    assert continued.code == 0, continued.stderr
    left_alone = program.start_python(TOY, str(tmp_path / "posix"))
    assert left_alone.communicate()[1] == ""
    for name in ("lora.safetensors", "log.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "posix" / name).read_bytes()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_a_folder_is_one_runs_until_that_is_dead(
    program: Program, tmp_path: Path, script: Callable[[str], tuple[str, str]]
) -> None:
    holder, state, folder = script(HOLDER), script(STATE), str(tmp_path / "run")
    with program.start_python(WITHOUT, *holder, folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert run(program, *state, folder).stdout == "running\n"
        second = run(program, "--script", TOY, folder)
        assert f"another run is writing here (process {process.pid} on" in second.stderr
        process.kill()
    assert run(program, *state, folder).stdout == "interrupted\n"
    assert run(program, "--script", TOY, folder).code == 0
