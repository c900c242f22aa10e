"""A machine that refuses something: told as that, never as a bug of the program; or it does not matter at all."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from flame_train import cli
from flame_train.config.load import load
from flame_train.families import FAMILY_TITLES


def test_standard_output_that_can_only_be_read_is_told_before_anything_is_done(job):
    script = (
        "import os, sys\n"
        "os.dup2(os.open(os.devnull, os.O_RDONLY), 1)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    _, errors = process.communicate()
    assert process.returncode == 4
    assert "standard output is open for reading only" in errors
    assert not job.out.exists()


def test_a_whole_run_in_a_python_without_docstrings_and_assertions(job, whole):
    ended = job.program.cold(*job.arguments("sdxl-lora"), env={"PYTHONOPTIMIZE": "2"})
    assert ended.code == 0, ended.stderr
    assert job.result() == whole


def test_no_thread_to_be_had(job, monkeypatch, capsys):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert cli.run([*job.arguments("sdxl-lora"), "--dry-run"]) == 4
    assert "the system refused another thread" in capsys.readouterr().err


NO_THREAD = """
import ctypes, os, resource, sys
if os.getuid() == 0:  # no limit binds that user, nor whoever may administer the system
    for capability in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
    os.setresuid(65534, 0, 0)  # processes are counted by the real user, files opened by the effective one
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another system counts threads otherwise")
@pytest.mark.parametrize(
    ("command", "blas_threads"),
    [
        *(("train", "1"), ("train", "4"), ("--dry-run", "1"), ("doctor", "4")),
        *(pytest.param(*other, marks=pytest.mark.proof) for other in (("--dry-run", "4"), ("doctor", "1"))),
    ],
)
def test_the_kernel_refuses_every_thread(job, command, blas_threads):
    """With several threads OpenBLAS is refused first, and raises SIGINT, which Python may drop as it imports NumPy."""
    arguments = ["doctor"] if command == "doctor" else job.arguments("sdxl-lora")
    arguments += ["--dry-run"] if command == "--dry-run" else []
    env = {"OPENBLAS_NUM_THREADS": blas_threads}
    process = job.program.start_python("-c", NO_THREAD, "-m", "flame_train", *arguments, env=env)
    _, errors = process.communicate()
    if command == "doctor":  # starts none of its own
        assert process.returncode in (0, 4), errors
        return
    assert process.returncode == 4, errors
    assert "the system refused another thread" in errors
    assert not (job.out / "lora.safetensors").exists()


_LAST_WORDS = {1: "OpenBLAS error: Memory allocation", -signal.SIGABRT: "memory allocation of"}
"""Libraries that end the process themselves, in C and in Rust: nothing can be said after them."""
ASKED_FOR = [pytest.param(size, marks=pytest.mark.proof) for size in (80, 150, 250, 400, 500, 800)]


@pytest.mark.parametrize("mebibytes", [100, 200, 300, 600, *ASKED_FOR])
def test_very_little_memory(job, mebibytes):
    """In a new interpreter, whose libraries want more than there is, or whose run does."""
    script = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({mebibytes << 20}, {mebibytes << 20}))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    _, errors = process.communicate()
    by_itself = _LAST_WORDS.get(process.returncode, "-")
    assert process.returncode in (0, 4, 5) or by_itself in errors, errors
    assert "bug in flame-train" not in errors


@pytest.mark.parametrize("key", ["data.path", "data.cache", "output.dir"])
def test_a_path_almost_as_long_as_the_system_takes(job, key):
    place = str(job.folder)
    while len(place) < 4070:
        place += "/" + "d" * min(200, 4070 - len(place))
    here = os.open("/", os.O_RDONLY)
    for part in place.strip("/").split("/"):  # deeper than one call may name
        if part.startswith("d" * 10):
            os.mkdir(part, dir_fd=here)
        here = os.open(part, os.O_RDONLY, dir_fd=here)
    job.settings[key] = place
    ended = job.train()
    assert ended.code in (0, 3, 4, 6), ended.stderr
    assert "bug in flame-train" not in ended.stderr


def test_an_optimised_python_reads_the_config_that_it_wrote(program, tmp_path):
    path = tmp_path / "x.toml"
    program.cold("init", "sdxl", "-o", str(path), env={"PYTHONOPTIMIZE": "2"})
    text = path.read_text().replace('checkpoint = ""', 'checkpoint = "b"').replace('path = ""', 'path = "p"')
    path.write_text(text.replace('dir = ""', 'dir = "o"'))
    assert load(str(path)).output.dir == "o"


COMMANDS = [each.name or each.callback.__name__.replace("_", "-") for each in cli.app.registered_commands]


def test_every_command_explains_itself_in_a_python_without_docstrings(program, capsys):
    """In one process: that of `init` and `quickstart` below is another."""
    script = (
        "import sys\n"
        "from flame_train import cli\n"
        "assert not __debug__ or sys.exit('PYTHONOPTIMIZE is not on')\n"
        "for name in sys.argv[1:]:\n"
        "    code = cli.run([*name.split(), '--help'])\n"
        "    if code: sys.exit(f'{name} --help ended with {code}')\n"
    )
    names = ["", *COMMANDS, "bench step", "bench ops", "bench memory"]
    process = program.start_python("-c", script, *names, env={"PYTHONOPTIMIZE": "2"})
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    for name in names:
        assert cli.run([*name.split(), "--help"]) == 0
    assert said == capsys.readouterr().out


def test_a_python_without_docstrings_writes_every_family_s_config(program, tmp_path, capsys):
    script = (
        "import sys\n"
        "from flame_train import cli\n"
        "assert not __debug__ or sys.exit('PYTHONOPTIMIZE is not on')\n"
        "for family in sys.argv[2:]:\n"
        "    code = cli.run(['init', family, '-o', f'{sys.argv[1]}/{family}.toml'])\n"
        "    if code: sys.exit(f'init {family} ended with {code}')\n"
    )
    process = program.start_python("-c", script, str(tmp_path), *FAMILY_TITLES, env={"PYTHONOPTIMIZE": "2"})
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    for family in FAMILY_TITLES:
        assert cli.run(["init", family]) == 0
        assert (tmp_path / f"{family}.toml").read_text() == capsys.readouterr().out


@pytest.mark.proof
def test_the_whole_quickstart_in_a_python_without_docstrings_and_assertions(program, tmp_path):
    ended = program.cold("quickstart", str(tmp_path / "q"), "--device", "cpu", env={"PYTHONOPTIMIZE": "2"})
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "q" / "run" / "lora.safetensors").is_file()
