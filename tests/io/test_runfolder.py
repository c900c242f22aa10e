"""The run folder: who may have it, what it holds, and that killing a run anywhere loses nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flame_train.disk import failpoint, system
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import is_temporary, make_folder, temporary_name
from flame_train.errors import ConfigError, FlameError, Interrupted, NonFiniteError, OutputError
from flame_train.io.runfolder import RunFolder
from flame_train.io.runlog import LogFile, mend_status, state_of
from tests.io.test_commit import file_size_limit
from tests.run_files import log_of

TOY = Path(__file__).with_name("toy_run.py")
ROOT = Path(__file__).parents[2]
POINTS = [
    "checkpoint.begin",
    "checkpoint.mid_file",
    "checkpoint.after_file",
    "checkpoint.before_manifest",
    "checkpoint.after_manifest",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "checkpoint.before_prune",
    "checkpoint.mid_prune",
]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def toy(folder: Path, armed: str = "") -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(TOY), str(folder), armed], env=environment, check=False).returncode


def outcome(folder: Path) -> dict[str, bytes]:
    """Every file of the finished run that must not depend on how it got there."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("status.json", ".lock")
    }
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 10)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert toy(folder) == 0
    found = outcome(folder)
    assert len(found["log.jsonl"].splitlines()) == 10
    assert "checkpoints/step-000010/MANIFEST.json" in found
    assert "checkpoints/step-000009/MANIFEST.json" in found
    assert "checkpoints/step-000006/MANIFEST.json" not in found
    return found


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_inside_a_save_continues_to_the_same_bytes(
    tmp_path: Path, uninterrupted: dict[str, bytes], point: str, nth: int
) -> None:
    killed = toy(tmp_path / "run", f"{point}:{nth}:kill")
    assert killed == (0 if (point, nth) == ("checkpoint.mid_prune", 3) else -signal.SIGKILL)
    assert toy(tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == uninterrupted


def test_a_run_killed_again_and_again_at_random_continues_to_the_same_bytes(
    tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    rng = random.Random(7)
    for _ in range(6):
        toy(tmp_path / "run", f"{rng.choice(POINTS)}:{rng.randint(1, 4)}:kill")
    assert toy(tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == uninterrupted


def test_a_full_disk_ends_the_run_with_the_old_checkpoint_whole(
    tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    assert toy(tmp_path / "run", "checkpoint.mid_file:2:enospc") == 1  # the toy lets the error out
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 6)
    assert toy(tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == uninterrupted


def folder(path: Path, config: str = "a = 1\n", table: str | None = None) -> RunFolder:
    return RunFolder(path, config, lambda old, found: table)


HOLDER = """
import sys
from pathlib import Path
from flame_train.io.runfolder import RunFolder
with RunFolder(Path(sys.argv[1]), "a = 1", lambda old, found: None):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_process_and_host(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(OutputError, match=f"process {holder.pid} on {os.uname().nodename}"):
        folder(tmp_path / "run").__enter__()


def test_a_page_that_looks_just_now_keeps_no_run_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks whether a run goes on holds the lock for a moment, shared."""
    (tmp_path / ".lock").touch()
    looking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(system.time, "sleep", lambda seconds: os.close(looking))
    with RunFolder(tmp_path, "", lambda old, found: None):
        assert state_of(tmp_path)["state"] == "running"


def test_the_lock_of_a_killed_run_is_gone(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_that_has_no_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    with folder(tmp_path / "run"):
        pass
    before = (tmp_path / "run" / "status.json").read_bytes()
    monkeypatch.setattr(fcntl, "flock", refuse)
    for attempt in (folder(tmp_path / "run").inspect, folder(tmp_path / "run").__enter__):
        with pytest.raises(
            OutputError, match=f"cannot be locked .{os.strerror(number)}.; set output.dir to a local disk"
        ):
            attempt()
    assert (tmp_path / "run" / "status.json").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (None, "done", 0),
        (Interrupted(signal.SIGTERM, "stopped"), "interrupted", 143),
        (Interrupted(signal.SIGINT, "stopped"), "interrupted", 130),
        (KeyboardInterrupt(), "interrupted", 130),
        (NonFiniteError("nan"), "failed", 7),
        (ConfigError("x"), "failed", 2),
        (MemoryError(), "failed", 5),
        (OSError(errno.ENOSPC, "full"), "failed", 6),
        (OSError(errno.EIO, "broken"), "failed", 4),
        (OSError(errno.EINVAL, "broken"), "failed", 1),
        (KeyError("x"), "failed", 1),
    ],
)
def test_the_status_says_how_a_run_ended(tmp_path: Path, error: BaseException | None, state: str, code: int) -> None:
    def body() -> None:
        with folder(tmp_path / "run") as run:
            running = json.loads((tmp_path / "run" / "status.json").read_text())
            assert (running["state"], running["exit_code"]) == ("running", None)
            run.resume()
            run.log({"step": 4})
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == (state, code, 4)


def test_the_status_of_a_run_that_found_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk() -> None:
        with folder(tmp_path / "run"):
            monkeypatch.setattr("flame_train.disk.atomic_write.free_bytes", lambda path: 0)
            raise OutputError("the disk is full")

    with pytest.raises(OutputError, match="the disk is full"):
        fill_the_disk()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 6)


def test_a_run_that_could_not_be_opened_is_not_said_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("flame_train.io.runfolder.LogFile", refuse)
    with pytest.raises(OutputError, match=r"log\.jsonl"):
        folder(tmp_path / "run", "a = 1\n").__enter__()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 6)


@pytest.mark.parametrize("number", [None, 0, 2])
def test_a_run_of_another_format_is_refused_by_name(tmp_path: Path, number: int | None) -> None:
    with folder(tmp_path / "run", "a = 1\n"):
        pass
    place = tmp_path / "run" / "status.json"
    status = json.loads(place.read_text())
    assert status.pop("format") == 1
    place.write_text(json.dumps(status | ({} if number is None else {"format": number})))
    with pytest.raises(OutputError, match=f"expected a run of format 1, got one of format {number or 0}, which flame"):
        folder(tmp_path / "run", "a = 1\n").__enter__()


def test_another_config_is_refused_with_its_table_and_nothing_changes(tmp_path: Path) -> None:
    with folder(tmp_path / "run", "a = 1\n"):
        pass
    before = (tmp_path / "run" / "status.json").read_bytes()
    with pytest.raises(OutputError, match="other settings, which change its result:\n  a 1 2"):
        folder(tmp_path / "run", "a = 2\n", "  a 1 2").__enter__()
    assert (tmp_path / "run" / "config.toml").read_text() == "a = 1\n"
    assert (tmp_path / "run" / "status.json").read_bytes() == before
    with folder(tmp_path / "run", "a = 3\n"):  # a difference that does not matter is taken over
        assert (tmp_path / "run" / "config.toml").read_text() == "a = 3\n"


def files_of(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in path.rglob("*") if p.is_file()}


def test_looking_tells_what_opening_would_and_writes_nothing(tmp_path: Path) -> None:
    assert folder(tmp_path / "none" / "run").inspect() is None
    assert not (tmp_path / "none").exists()
    with folder(tmp_path / "run") as run:
        run.resume()
        run.checkpoint(3, {"state.json": b"{}"}, keep=1)
    left = files_of(tmp_path)
    found = folder(tmp_path / "run").inspect()
    assert found is not None
    assert found.step == 3
    with pytest.raises(OutputError, match="other settings"):
        folder(tmp_path / "run", table="  a 1 2").inspect()
    assert files_of(tmp_path) == left


def test_looking_sees_a_run_that_is_writing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(OutputError, match=f"process {holder.pid} on"):
        folder(tmp_path / "run").inspect()


def test_looking_sees_a_file_in_the_way_and_a_disk_that_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file is a file"):
        folder(tmp_path / "file" / "run").inspect()
    usual = os.statvfs(tmp_path)
    only_read = os.statvfs_result([*usual[:8], usual.f_flag | os.ST_RDONLY, *usual[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: only_read)
    with pytest.raises(OutputError, match="choose a folder this user may write to"):
        folder(tmp_path / "run").inspect()


def test_a_run_that_was_killed_before_its_config_was_written_may_begin_again(tmp_path: Path) -> None:
    with folder(tmp_path / "run"):
        pass
    for name in ("config.toml", "log.jsonl"):
        (tmp_path / "run" / name).unlink()
    with folder(tmp_path / "run") as run:
        assert run.resume() is None


@pytest.mark.parametrize(("state", "refused"), [("done", True), ("failed", False)])
def test_an_older_status_without_what_was_saved(tmp_path: Path, state: str, refused: bool) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
    (tmp_path / "run" / "status.json").write_text(json.dumps({"state": state, "step": 4}))
    if refused:
        with pytest.raises(OutputError, match="checkpoints are gone"):
            folder(tmp_path / "run").inspect()
    else:
        assert folder(tmp_path / "run").inspect() is None


@pytest.mark.parametrize("name", ["config.toml", "lora.safetensors", "log.jsonl"])
def test_files_that_are_no_runs_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=f"found {name} without status.json"):
        folder(tmp_path).__enter__()
    assert (tmp_path / name).read_text() == "mine"


def test_a_named_result_that_is_no_runs_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tiles.safetensors").write_text("mine")
    run = RunFolder(tmp_path, "a = 1\n", lambda old, found: None, "tiles")
    with pytest.raises(OutputError, match=r"found tiles\.safetensors without status\.json"):
        run.__enter__()
    assert (tmp_path / "tiles.safetensors").read_text() == "mine"


@pytest.mark.parametrize("name", ["tiles.safetensors", "tiles.diffusers.safetensors", "lora.safetensors"])
def test_a_link_in_place_of_a_named_result_is_refused(tmp_path: Path, name: str) -> None:
    with RunFolder(tmp_path / "run", "a = 1\n", lambda old, found: None, "tiles") as run:
        run.resume()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match="found a link to"):
        run.__enter__()


@pytest.mark.parametrize(
    ("name", "result", "of_a_step"),
    [
        ("", "lora.safetensors", "lora.safetensors"),
        ("tiles v1.5", "tiles v1.5.safetensors", "tiles v1.5-000500.safetensors"),
    ],
)
def test_the_files_of_a_name(tmp_path: Path, name: str, result: str, of_a_step: str) -> None:
    run = RunFolder(tmp_path, "", lambda old, found: None, name)
    assert (run.lora.name, run.lora_of(500)) == (result, of_a_step)
    assert run.lora_beside("diffusers").name == result.replace(".safetensors", ".diffusers.safetensors")


def test_a_file_in_the_way_is_refused_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OutputError, match="file is a file"):
            folder(path).__enter__()
    with folder(tmp_path / "a" / "b" / "run"):
        pass
    assert (tmp_path / "a" / "b" / "run" / "status.json").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutputError, match="choose a folder this user may write to") as caught:
        folder(tmp_path / "run").__enter__()
    assert isinstance(caught.value, FlameError)


def test_the_log_is_cut_back_to_the_checkpoint_and_a_torn_line_goes(tmp_path: Path) -> None:
    with folder(tmp_path) as run:
        run.resume()
        for step in (1, 2, 3):
            run.log({"step": step})
            if step == 2:
                run.checkpoint(2, {"state.json": b"{}"}, keep=1)
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"step": 4, "lo')
    with folder(tmp_path) as run:
        found = run.resume()
        assert found is not None
        assert found.step == 2
        run.log({"step": 3, "again": True})
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "again": True},
    ]


def lines_of(path: Path) -> list[int]:
    return [row["step"] for row in log_of(path)]


@pytest.mark.parametrize("room", [0, 5, 12, 17])
def test_a_full_disk_delays_lines_of_the_log_and_costs_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    with OpenFolder.open(tmp_path) as held:
        log = LogFile(held / "log.jsonl")
        with file_size_limit(room):
            log.append({"step": 1})
            log.append({"step": 2})
            log.sync()
        log.append({"step": 3})
        log.close()
    assert lines_of(tmp_path) == [1, 2, 3]
    (told,) = [record.message for record in caplog.records]
    assert re.fullmatch(r".*log\.jsonl: (No space left|File too large).*; its lines wait for room", told)


def test_lines_and_grids_that_wait_go_into_the_checkpoint_and_are_written_at_the_next_start(tmp_path: Path) -> None:
    """A line of a step that is done is not made again, nor its grid: the weights are others then."""
    with folder(tmp_path / "run") as run:
        run.resume()
        run.log({"step": 1})
        failpoint.arm("log.append:all:enospc,sample.before_write:all:enospc")
        run.log({"step": 2})
        run.write_sample(2, b"the grid of step 2")
        assert run.has_sample(2)
        run.log({"step": 3})
        run.checkpoint(3, {"state.json": b"{}"}, keep=1)
        run.log({"step": 4})
    failpoint.arm("")
    assert lines_of(tmp_path / "run") == [1]
    assert not (tmp_path / "run" / "samples").exists()
    with folder(tmp_path / "run") as run:
        assert run.resume() is not None
        assert lines_of(tmp_path / "run") == [1, 2, 3]
        assert run.sample(2).read_bytes() == b"the grid of step 2"
        run.log({"step": 4})
    assert lines_of(tmp_path / "run") == [1, 2, 3, 4]


def test_what_waits_is_written_as_soon_as_there_is_room(tmp_path: Path) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
        failpoint.arm("log.append:enospc,sample.before_write:enospc")
        run.log({"step": 1})
        run.write_sample(1, b"a grid")
        path = run.checkpoint(1, {"state.json": b"{}"}, keep=1)
        failpoint.arm("")
        assert lines_of(tmp_path / "run") == [1]
        assert run.sample(1).read_bytes() == b"a grid"
        assert sorted(file.name for file in path.iterdir()) == ["MANIFEST.json", "state.json"]


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    with OpenFolder.open(tmp_path) as held:
        log = LogFile(held / "log.jsonl")
        log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
        log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e400}',
        '{"step": 3.5}',
        '{"step": true}',
        '{"step": ' + "9" * 400 + "}",
        "[" * 100_000,
        "\0",
        "{}",
        '{"step": NaN}',
        '{"step": -1}',
        '{"step": "1"}',
    ],
)
def test_the_log_is_cut_where_a_line_is_none_of_ours(tmp_path: Path, line: str) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
        run.log({"step": 1})
        run.log({"step": 2})
        run.checkpoint(2, {"state.json": b"{}"}, keep=1)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text() + line + "\n")
    with folder(tmp_path / "run") as run:
        run.resume()
        assert run.last() == {"step": 2}
    assert lines_of(tmp_path / "run") == [1, 2]


WRITER = """
import sys
from pathlib import Path
from flame_train.disk.atomic_write import write_atomically
def chunks():
    yield b"half"
    print("writing", flush=True)
    sys.stdin.read()
    yield b"half"
write_atomically(Path(sys.argv[1]), chunks(), 8)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing `file` of the run's folder."""
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "run" / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def hidden(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name.startswith(".") and p.name != ".lock")


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.wait()
    assert len(hidden(tmp_path / "run")) == 1
    write_atomically(tmp_path / "run" / "another file", [b"x"], 1)
    assert hidden(tmp_path / "run") == []


def test_what_another_process_is_writing_is_not(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    with folder(tmp_path / "run"):
        pass
    write_atomically(tmp_path / "run" / "another file", [b"x"], 1)
    assert len(hidden(tmp_path / "run")) == 1
    writer.communicate("")
    assert writer.returncode == 0
    assert (tmp_path / "run" / "file").read_bytes() == b"halfhalf"
    assert hidden(tmp_path / "run") == []


USERS = (
    ".notes",
    ".notes.tmp-draft",
    ".my.tmp-notes",
    ".x.tmp-123",
    ".a.flame-0123.tmp",
    "b.flame-0123456789abcdef.tmp",
)


def test_only_names_of_the_form_that_this_program_gives_are_swept(tmp_path: Path) -> None:
    with folder(tmp_path / "run"):
        pass
    for place in (tmp_path / "run", tmp_path / "run" / "samples"):
        place.mkdir(exist_ok=True)
        for name in (*USERS, temporary_name("lora.safetensors"), temporary_name("x" * 250)):
            (place / name).write_bytes(b"half")
        (place / temporary_name("folder")).mkdir()
        (place / temporary_name("link")).symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("mine")
    with folder(tmp_path / "run"):
        pass
    for place in (tmp_path / "run", tmp_path / "run" / "samples"):
        left = {p.name for p in place.iterdir()}
        assert left >= set(USERS)
        assert sorted(name.split(".flame")[0] for name in filter(is_temporary, left)) == [".folder", ".link"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_temporary_names_cannot_be_guessed_and_are_never_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({temporary_name("a") for _ in range(100)}) == 100
    victim, names = tmp_path / "victim", iter(["0" * 16, "0" * 16, "1" * 16, "2" * 16, "3" * 16, "4" * 16])
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda count: next(names))
    target = tmp_path / "target"
    (tmp_path / f".target.flame-{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(OutputError, match="target: cannot be written"):
        write_atomically(target, [b"overwritten"], 11)
    (tmp_path / f".write-probe.flame-{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(OutputError, match="cannot be written"):
        make_folder(tmp_path)
    assert victim.read_text() == "mine"


def test_a_run_that_was_killed_is_said_to_run_by_nobody(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """What kill -9, a terminal that was closed under a shell, or a second Ctrl-C leave is told by the lock."""
    assert state_of(tmp_path / "run")["state"] == "running"
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running"
    assert state_of(tmp_path / "run")["state"] == "interrupted"


def test_the_next_command_mends_the_status_of_a_killed_run_also_if_it_is_refused(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    with pytest.raises(OutputError, match="other settings"):
        folder(tmp_path / "run", "a = 2\n", "  a 1 2").__enter__()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["pid"]) == ("interrupted", None, holder.pid)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"saved": Infinity}', '{"state": "\\ud800", "pid": {}}', "\0"])
def test_a_status_that_makes_no_sense_stops_nobody(tmp_path: Path, text: str) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
        run.checkpoint(3, {"state.json": b"{}"}, keep=1)
    (tmp_path / "run" / "status.json").write_text(text)
    with folder(tmp_path / "run") as run:
        assert run.resume() is not None
    assert state_of(tmp_path / "run")["state"] == "done"


def test_a_log_without_an_end_is_cut_and_not_read_whole(tmp_path: Path) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
        run.log({"step": 1})
        run.checkpoint(1, {"state.json": b"{}"}, keep=1)
    os.truncate(tmp_path / "run" / "log.jsonl", 1 << 40)
    with folder(tmp_path / "run") as run:
        run.resume()
    assert lines_of(tmp_path / "run") == [1]


def test_a_checkpoint_without_an_end_is_damaged_and_not_read_whole(tmp_path: Path) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
        path = run.checkpoint(1, {"state.json": b"{}"}, keep=1)
    os.truncate(path / "state.json", 1 << 40)
    with pytest.raises(OutputError, match=f"state.json has {1 << 40} bytes, its manifest says 2"):
        folder(tmp_path / "run").inspect()


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    with folder(tmp_path / "run") as run:
        run.resume()
    (tmp_path / "run" / ".lock").unlink()
    os.mkfifo(tmp_path / "run" / ".lock")
    assert state_of(tmp_path / "run")["state"] == "done"


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_status_that_is_no_plain_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "status.json"
    {"pipe": os.mkfifo, "folder": Path.mkdir, "link": lambda path: path.symlink_to("elsewhere")}[kind](path)
    with pytest.raises(OutputError, match=r"status\.json"):
        state_of(tmp_path)


def test_a_status_that_cannot_be_read_just_now_does_not_start_a_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would tell that there were checkpoints."""
    with folder(tmp_path / "run") as run:
        run.resume()
        run.checkpoint(3, {"state.json": b"{}"}, keep=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    usual = os.open

    def refuse(path: str, flags: int, *arguments: int, **named: int) -> int:
        if path == "status.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return usual(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    for attempt in (folder(tmp_path / "run").inspect, folder(tmp_path / "run").__enter__):
        with pytest.raises(OutputError, match=r"cannot be read just now \(Input/output error\)"):
            attempt()


def test_the_status_moves_with_the_steps_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("flame_train.io.runfolder.time.monotonic", lambda: clock[0])
    place, seen = tmp_path / "run" / "status.json", []
    with RunFolder(tmp_path / "run", "toy = true\n", lambda old, found: None) as run:
        run.resume()
        for step in range(1, 8):
            clock[0] += 0.4
            run.log({"step": step, "loss": 1.0}, {"mean_loss": step / 2, "steps_per_s": 2.5, "steps": 7})
            seen.append(json.loads(place.read_text()))
    assert [status["step"] for status in seen] == [1, 1, 1, 4, 4, 4, 7]
    told = seen[3]
    assert (told["state"], told["mean_loss"], told["steps_per_s"], told["steps"]) == ("running", 2.0, 2.5, 7)
    assert len({place.stat().st_size, 512}) == 1
    assert not any(is_temporary(path.name) for path in place.parent.iterdir())


def test_a_status_that_cannot_be_refreshed_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with RunFolder(tmp_path / "run", "toy = true\n", lambda old, found: None) as run:
        run.resume()
        with monkeypatch.context() as patched:
            patched.setattr("flame_train.io.runlog.write_unsynced", full)
            run.log({"step": 1, "loss": 1.0})
        assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 0


def test_the_last_losses_are_those_of_the_log(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "toy = true\n", lambda old, found: None) as run:
        run.resume()
        for step, loss in enumerate((3.0, 2.0, float("nan"), 1.5), 1):
            run.log({"step": step, "loss": loss})
        assert run.losses(10) == [3.0, 2.0, 1.5]
        assert run.losses(2) == [1.5]


def test_a_killed_run_says_so_even_if_the_next_command_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path, "toy = true\n", lambda old, found: None) as run:
        run.resume()
        running = (path / "status.json").read_bytes()
        mend_status(path)
        assert json.loads((path / "status.json").read_text())["state"] == "running", "it is in use"
    (path / "status.json").write_bytes(running)  # as SIGKILL leaves it
    mend_status(path)
    assert json.loads((path / "status.json").read_text())["state"] == "interrupted"
    mend_status(tmp_path / "none")
