"""The queue of the window, with a stand-in for the program: each run starts once, whatever is killed, and what came of
it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError, OutputError
from flame_train.io import run_process as process
from flame_train.io.run_output import said
from flame_train.io.runlog import LOCK
from flame_train.ui.queue import Queue
from flame_train.ui.queue_file import QUEUE, Book, Entry, read_queue, write_queue

from .conftest import until

STAND_IN = """
import os, signal, sys, time
at = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = at["--output"]
with open(os.path.dirname(folder) + "/starts", "a") as starts:
    starts.write(f"{os.path.basename(folder)} {at['--device']}\\n")
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("hello from", os.path.basename(folder), flush=True)
while not os.path.exists(folder + "/end"):
    time.sleep(0.01)
code = int(open(folder + "/end").read())
print("error: it went wrong" if code else "done", flush=True)
sys.exit(code)
"""
"""Says which run starts where, and ends with the number in the file `end` of its folder."""

SERVER = """
import sys
from pathlib import Path
from flame_train.disk import failpoint
from flame_train.disk.roots import Roots
from flame_train.ui.queue import Queue
root, points, *command = sys.argv[1:]
failpoint.arm(points)
Queue(Roots([Path(root)]), ["cuda:0", "cuda:1"], command).step()
"""
KEEPER = """
import sys
from pathlib import Path
from flame_train.disk import failpoint
from flame_train.io.run_process import keep
failpoint.arm(sys.argv[1])
keep(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:])
"""


class Place:
    """A root with runs in it, and the queue over it."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, root / "runs"
        self.runs.mkdir(parents=True)
        (root / "stand_in.py").write_text(STAND_IN)
        self.servers: list[Queue] = []
        self.command = [sys.executable, "-I", "-S", str(root / "stand_in.py")]
        self.queue = self.server()

    def server(self) -> Queue:
        """A server that has just started."""
        self.servers.append(Queue(Roots([self.root]), ["cuda:0", "cuda:1"], self.command))
        return self.servers[-1]

    def config(self, name: str, images: Path | None = None) -> Path:
        path, images = self.root / f"{name}.toml", images or self.root / "photos"
        keys = {"model.checkpoint": self.root / "base.safetensors", "data.path": images, "output.dir": self.runs / name}
        path.write_text("".join(f'{key} = "{value}"\n' for key, value in keys.items()))
        return path

    def add(self, *names: str, device: str = "cuda") -> None:
        for name in names:
            self.queue.add(self.config(name), self.runs / name, device)

    def end(self, name: str, code: int = 0) -> None:
        (self.runs / name).mkdir(exist_ok=True)
        (self.runs / name / "end.part").write_text(str(code))
        (self.runs / name / "end.part").rename(self.runs / name / "end")

    @property
    def starts(self) -> list[str]:
        path = self.runs / "starts"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def book(self) -> Book:
        with OpenFolder.open(self.root) as folder:
            return read_queue(folder)

    def write(self, book: Book) -> None:
        with OpenFolder.open(self.root) as folder:
            write_queue(folder, book)

    def states(self) -> dict[str, str]:
        self.queue.step()
        return {Path(run.folder).name: run.state for run in self.book.runs}

    def said_of(self, name: str) -> str:
        return next(run.said for run in self.book.runs if Path(run.folder).name == name)

    def close(self, server: Queue) -> None:
        """Another server may take the queue over: this one is as dead."""
        if server._lock is not None:
            os.close(server._lock)
        server._lock = None


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path / "root")
    yield made
    for folder in made.runs.iterdir():
        if folder.is_dir():
            made.end(folder.name)
    for server in made.servers:
        for keeper, _ in server._begun.values():
            keeper.wait(30)
        made.close(server)


def test_three_runs_go_over_two_gpus_each_on_one(place):
    place.add("a", "b", "c")
    until(lambda: len(place.starts) == 2)
    assert sorted(place.starts) == ["a cuda:0", "b cuda:1"]
    assert place.states() == {"a": "started", "b": "started", "c": "waiting"}
    place.end("b")
    until(lambda: place.states()["b"] == "done")
    until(lambda: len(place.starts) == 3)
    assert place.starts[2] == "c cuda:1"
    place.add("d", device="cpu")
    place.add("e", device="cuda:0")
    until(lambda: "d cpu" in place.starts)
    assert place.states()["e"] == "waiting"
    for name in ("a", "c", "d", "e"):
        place.end(name)
    until(lambda: set(place.states().values()) == {"done"})
    assert place.starts[-1] == "e cuda:0"
    assert said(place.runs / "a") == ["hello from a", "done"]


@pytest.mark.parametrize(
    "moment",
    [
        "queue.before_note",
        "file.mid_write",
        "file.before_rename",
        "queue.noted",
        "queue.begun",
        "process.kept",
        "process.started",
        "it goes on",
        "it ended meanwhile",
        "its end is noted",
    ],
)
def test_the_server_is_killed_at_any_moment_and_starts_each_run_once(place, forked, moment):
    """`process.` are moments of the keeper of a run: the run goes on without it, or is told to have been killed."""
    run = Entry("1", str(place.config("a")), str(place.runs / "a"), "cuda")
    place.write(Book(runs=(run, replace(run, id="2", config=str(place.config("b")), folder=str(place.runs / "b")))))
    code = [*forked, "-c", SERVER, str(place.root)]
    if moment.startswith("process."):
        noted = replace(run, state="started", attempt="x", on="cuda:0")
        place.write(replace(place.book, runs=(noted, place.book.runs[1])))
        (place.runs / "a").mkdir()
        words = [moment, str(place.root), "runs/a", "x", "cuda:0", *place.command]
        words += ["train", "--output", str(place.runs / "a"), "--device", "cuda:0"]
        assert subprocess.run([*forked, "-c", KEEPER, *words], check=False).returncode == -signal.SIGKILL
    else:
        points = moment if "." in moment else ""
        ended = subprocess.run([*code, points, *place.command], check=False)
        assert ended.returncode == (-signal.SIGKILL if points else 0)
        if not points:
            until(lambda: len(place.starts) == 2)
        if moment != "it goes on" and not points:
            place.end("a")
            until(lambda: process_of(place, "a").code == 0)
        if moment == "its end is noted":
            killed = subprocess.run([*code, "file.before_rename", *place.command], check=False)
            assert killed.returncode == -signal.SIGKILL
    for name in ("a", "b"):
        place.end(name)
    until(lambda: set(place.states().values()) <= {"done", "failed"})
    assert sorted(line.split()[0] for line in place.starts) == (["b"] if moment == "process.kept" else ["a", "b"])
    if moment in ("process.kept", "process.started"):  # nobody was left to note how the second one ended
        assert place.states() == {"a": "failed", "b": "done"}
        assert "was killed; it goes on from its last checkpoint" in place.said_of("a")
    else:
        assert set(place.states().values()) == {"done"}


def process_of(place, name):
    with OpenFolder.open(place.runs / name) as folder:
        return process.look(folder)


def test_a_server_that_starts_again_finds_its_runs_and_stops_one(place):
    place.add("a")
    until(lambda: place.starts == ["a cuda:0"])
    until(lambda: process_of(place, "a").created > 0)
    place.close(place.queue)
    place.queue = place.server()
    assert place.states() == {"a": "started"}
    with OpenFolder.open(place.runs / "a") as folder:
        assert process.stop(folder)
    until(lambda: place.states() == {"a": "stopped"})
    with OpenFolder.open(place.runs / "a") as folder:
        assert not process.stop(folder)
    place.queue.change(place.book.runs[0].id, "again")
    until(lambda: len(place.starts) == 2)


def test_a_number_that_another_process_has_now_gets_no_signal(place, monkeypatch):
    place.add("a")
    until(lambda: process_of(place, "a").created > 0)
    sent = []
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 5.0)
    with OpenFolder.open(place.runs / "a") as folder:
        assert not process.stop(folder)
    assert sent == []


@pytest.mark.parametrize("told", ["go on", "wait"])
def test_after_a_failure_the_queue_goes_on_or_waits_as_it_was_told(place, told):
    place.queue.settle(after_failure=told)
    place.add("a", "b", "c")
    until(lambda: len(place.starts) == 2)
    place.end("a", 6)
    until(lambda: place.states()["a"] == "failed")
    assert place.said_of("a") == "ended with 6 error: it went wrong"
    if told == "wait":
        assert (place.states()["c"], place.book.paused) == ("waiting", "a failed")
        place.queue.settle(paused="")
    until(lambda: "c cuda:0" in place.starts)
    os.kill(process_of(place, "c").pid, signal.SIGKILL)
    until(lambda: place.states()["c"] == "failed")
    assert place.said_of("c").startswith("ended with 137")
    assert place.book.paused == ("c failed" if told == "wait" else "")


def test_on_a_full_disk_nothing_starts_that_cannot_be_noted(place, monkeypatch):
    place.write(Book(runs=(Entry("1", str(place.config("a")), str(place.runs / "a"), "cuda"),)))

    def full(folder, book):
        raise OutputError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("flame_train.ui.queue.write_queue", full)
        place.queue.step()
        assert place.queue.told()["trouble"] == "no space left"
        assert place.queue._begun == {}
    until(lambda: place.states() == {"a": "started"})
    until(lambda: place.starts == ["a cuda:0"])
    assert place.queue.told()["trouble"] == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("after_failure = ", "expected TOML"),
        ("\xff", "expected TOML"),
        ('after_failure = "stop"', "after_failure: expected"),
        ('more = "x"', "more: expected one of after_failure"),
        ("paused = true", "paused: expected a text in quotes"),
        ('runs = "x"', "expected at most 1000 tables"),
        ('[[runs]]\nid = "1"', "runs 1: config: expected a text"),
        ('[[runs]]\nid = "1"\nconfig = "c"\nfolder = "f"\ndevice = "tpu"', "runs 1: device: expected"),
        ('[[runs]]\nid = "1"\nconfig = "c"\nfolder = "f"\ndevice = "cpu"\nstate = "x"', "runs 1: state: expected"),
        ('[[runs]]\nid = "1"\nconfig = "c"\nfolder = "f"\ndevice = "cpu"\nstate = "started"', "has attempt and on"),
        ('[[runs]]\nid = "1"\nconfig = "c"\nfolder = "f"\ndevice = "cpu"\n' * 2, "two runs have the same"),
        ("#" * (1 << 21), "expected at most"),
        (f'[[runs]]\nid = "{"1" * 65}"\nconfig = "c"\nfolder = "f"\ndevice = "cpu"', "at most 64 characters"),
    ],
)
def test_a_damaged_file_is_named_and_left_as_it_is(place, text, wrong):
    (place.root / QUEUE).write_text(text, encoding="latin-1")
    place.queue.step()
    assert wrong in place.queue.told()["trouble"]
    assert QUEUE in place.queue.told()["trouble"]
    with pytest.raises(ConfigError):
        place.add("a")
    assert (place.root / QUEUE).read_text(encoding="latin-1") == text
    (place.root / QUEUE).unlink()
    place.add("a")
    until(lambda: place.starts == ["a cuda:0"])


def test_what_is_written_by_hand_names_no_place_outside(place, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.toml").write_text("")
    (place.root / "link").symlink_to(outside)
    runs = {
        "config": (str(outside / "x.toml"), str(place.runs / "a")),
        "linked config": (str(place.root / "link" / "x.toml"), str(place.runs / "b")),
        "folder": (str(place.config("x")), str(outside / "run")),
        "linked folder": (str(place.config("x")), str(place.root / "link" / "run")),
        "key": (str(place.config("y", outside)), str(place.runs / "c")),
        "root": (str(place.config("x")), str(place.root)),
    }
    place.write(Book(runs=tuple(Entry(name, *paths, "cuda") for name, paths in runs.items())))
    place.queue.step()
    assert [run.state for run in place.book.runs] == ["failed"] * len(runs)
    assert all("expected a place below" in run.said for run in place.book.runs[:-1])
    assert (place.starts, [*outside.iterdir()]) == ([], [outside / "x.toml"])
    started = [replace(run, state="started", attempt="x", on="cuda:0") for run in place.book.runs]
    place.write(Book(runs=tuple(started)))
    place.queue.step()
    assert (place.starts, [*outside.iterdir()]) == ([], [outside / "x.toml"])


def test_two_servers_have_one_queue_and_a_run_is_in_it_once(place):
    place.add("a")
    other = place.server()
    other.step()
    assert "another `flame-train ui` has the queue" in other.told()["trouble"]
    with pytest.raises(OutputError, match="another"):
        other.add(place.config("b"), place.runs / "b", "cuda")
    with pytest.raises(ConfigError, match="in the queue already"):
        place.add("a")
    place.close(place.queue)
    other.add(place.config("b"), place.runs / "b", "cuda")
    until(lambda: len(place.starts) == 2)


def test_what_goes_on_by_hand_or_has_no_device_is_not_queued(place):
    (place.runs / "a").mkdir()
    with OpenFolder.open(place.runs / "a") as folder:
        descriptor = folder.file(LOCK, os.O_RDWR | os.O_CREAT)
        process.lock(descriptor)
        with pytest.raises(ConfigError, match="goes on already"):
            place.add("a")
        os.close(descriptor)
    for device in ("cuda:7", "tpu", "--help", ""):
        with pytest.raises(ConfigError, match="expected a device of this machine: cuda:0, cuda:1, cpu"):
            place.add("b", device=device)
    with pytest.raises(ConfigError, match="expected a folder below"):
        place.queue.add(place.config("c"), place.root, "cuda")


def test_runs_are_moved_and_taken_out(place):
    place.queue.settle(paused="by a test")
    place.add("a", "b", "c")
    ids = [run.id for run in place.book.runs]
    place.queue.change(ids[2], "up")
    place.queue.change(ids[0], "remove")
    assert [run.id for run in place.book.runs] == [ids[2], ids[1]]
    with pytest.raises(ConfigError, match="not in the queue any more"):
        place.queue.change(ids[0], "again")
    place.queue.settle(paused="")
    until(lambda: len(place.starts) == 2)
    with pytest.raises(ConfigError, match="stop it first"):
        place.queue.change(ids[1], "remove")


@pytest.mark.parametrize("how", ["an older text", "no text"])
def test_a_run_that_goes_on_keeps_its_gpu_whatever_an_editor_writes(place, how):
    place.queue.settle(after_failure="wait")
    before = Entry("1", str(place.config("a")), str(place.runs / "a"), "cuda")
    more = Entry("2", str(place.config("b")), str(place.runs / "b"), "cuda:0")
    place.write(replace(place.book, runs=(before,)))
    place.queue.step()
    until(lambda: process_of(place, "a").pid and place.starts == ["a cuda:0"])
    place.write(replace(place.book, runs=(before, more) if how == "an older text" else (more,)))
    assert place.states()["b"] == "waiting"
    assert (place.states().get("a", "started"), place.starts) == ("started", ["a cuda:0"])
    place.end("a")
    until(lambda: place.states()["b"] == "started")
    assert place.book.paused == ""


def test_a_started_run_outside_of_the_folders_stops_no_other_and_is_taken_out(place, tmp_path):
    gone = Entry("1", str(tmp_path / "b.toml"), str(tmp_path / "b"), "cuda", "started", "x", "cuda:1")
    place.write(Book(runs=(gone, Entry("2", str(place.config("a")), str(place.runs / "a"), "cuda"))))
    place.queue.step()
    until(lambda: place.starts == ["a cuda:0"])
    assert "expected a place below" in place.said_of("b")
    place.queue.change("1", "remove")
    assert place.states() == {"a": "started"}


def test_a_started_run_that_never_began_is_judged_before_it_is(place):
    damaged = place.config("a")
    damaged.write_text(damaged.read_text() + "more = 1")
    place.write(Book(runs=(Entry("1", str(damaged), str(place.runs / "a"), "cuda", "started", "x", "cuda:0"),)))
    assert (place.states(), place.starts) == ({"a": "failed"}, [])


def test_a_long_refusal_and_many_runs_leave_a_file_that_can_be_read(place):
    place.config("a").write_text(f"{'k' * 9000} = 1")
    place.write(Book(runs=(Entry("1", str(place.root / "a.toml"), str(place.runs / "a"), "cuda"),)))
    assert place.states() == {"a": "failed"}
    entry = place.book.runs[0]
    with pytest.raises(OutputError, match="remove runs from it that are done"):
        place.write(Book(runs=tuple(replace(entry, id=str(number)) for number in range(1001))))
    assert place.states() == {"a": "failed"}


def test_what_began_beside_modules_of_the_same_names_runs_none_of_them_and_hears_ctrl_c(place, monkeypatch):
    """A window's working folder is a dataset as often as not, and a shell's background job ignores Ctrl-C."""
    (place.root / "psutil.py").write_text("raise SystemExit('a module of the working folder')")
    monkeypatch.chdir(place.root)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        place.command[1:3] = ["-P", "-S"]
        place.queue = place.server()
        deaf = STAND_IN.replace("signal.signal(signal.SIGINT, lambda *_: sys.exit(130))", "")
        (place.root / "stand_in.py").write_text(deaf)
        place.add("a")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: place.starts == ["a cuda:0"])
    until(lambda: process_of(place, "a").created > 0)
    with OpenFolder.open(place.runs / "a") as folder:
        assert process.stop(folder)
    until(lambda: place.states()["a"] == "stopped")


def test_a_disk_without_locks_is_named_and_no_file_stays_open(place, monkeypatch):
    def refused(descriptor, **how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("flame_train.ui.queue.lock", refused)
    place.queue.step()
    before = len(os.listdir("/proc/self/fd"))
    place.queue.step()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "its disk has no locks" in place.queue.told()["trouble"]
    with pytest.raises(OutputError, match="its disk has no locks"):
        place.queue.settle(paused="x")


def test_a_run_that_waits_for_a_device_that_is_gone_says_so(place):
    place.write(Book(runs=(Entry("1", str(place.config("a")), str(place.runs / "a"), "cuda:5"),)))
    place.queue.step()
    assert "waits for a device" in place.queue.told()["runs"][0]["said"]
