"""What the window's pages may have done with runs: by one window at a time, below its roots, and as a list of words."""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path

import pytest

from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.roots import Roots
from flame_train.io.requests import name_of
from flame_train.io.run_process import PROCESS, lock
from flame_train.io.runlog import LOCK
from flame_train.ui import runs
from flame_train.ui.lease import Lease

from .conftest import until
from .test_queue import STAND_IN
from .test_window import JSON, TOKEN


class Page:
    """A window in some browser."""

    def __init__(self, port, name):
        self.port, self.name, self.acts = port, name, False

    def ask(self, what, /, **question):
        """(status, answer) of a question."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Cookie": f"flame-train-{self.port}={TOKEN}", "Origin": f"http://127.0.0.1:{self.port}", **JSON}
        connection.request("POST", f"/ask/{what}", json.dumps(question), headers | {"X-Flame-Window": self.name})
        answer = connection.getresponse()
        raw = json.loads(answer.read())
        self.acts = answer.headers["X-Flame-Acts"] == "yes"
        connection.close()
        return answer.status, raw

    def told(self, what, /, **question):
        status, answer = self.ask(what, **question)
        assert status == 200, answer
        return answer


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "photos").mkdir(parents=True)
    (tmp_path / "root" / "stand_in.py").write_text(STAND_IN)
    return tmp_path / "root"


@pytest.fixture
def page(serve, root):
    """A window over a root, whose queue starts a stand-in for the program."""
    command = [sys.executable, "-I", "-S", str(root / "stand_in.py")]
    one = Page(serve(root, token=TOKEN, window=True, devices=["cuda:0"], command=command), "one")
    yield one
    for file in root.rglob(PROCESS):
        file.with_name("end").write_text("0")
    until(lambda: all(run["state"] != "started" for run in one.told("queue")["runs"]))


def config(root, folder):
    keys = {"model.checkpoint": root / "base.safetensors", "data.path": root / "photos", "output.dir": folder}
    return "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in keys.items())


def start(page, root, name="run; touch x", device="cuda"):
    file = {"toml": config(root, root / name), "path": f"{root}/{name}.toml", "device": device, "force": True}
    return page.ask("start", **file)


def entry(page):
    return page.told("queue")["runs"][0]


def test_a_run_that_has_said_nothing_yet_is_told_to_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "is_locked", lambda _: True)
    said = runs.told(OpenFolder.open(tmp_path), Roots([tmp_path]))
    assert said == {"goes_on": True, "now": "its process begins: Python and libraries load", "lines": []}


def test_a_run_is_started_told_and_stopped(page, root):
    status, made = start(page, root)
    assert status == 200
    until(lambda: entry(page)["now"] == "hello from run; touch x")
    assert (root / "starts").read_text() == "run; touch x cuda:0\n"
    assert start(page, root)[0] == 400
    assert "goes on; stop it first" in page.ask("move", entry=made["entry"], what="remove")[1]["error"]
    assert "prepares its first step" in page.ask("act", entry=made["entry"], what="save")[1]["error"]
    assert page.told("act", entry=made["entry"], what="stop")["done"].startswith("it stops as soon")
    until(lambda: entry(page)["state"] == "stopped")
    assert page.told("move", entry=made["entry"], what="remove")["runs"] == []
    assert page.told("settle", paused=True, after_failure="wait")["paused"] == "paused by you"
    assert start(page, root, "other")[0] == 200
    assert entry(page)["state"] == "waiting"


def test_one_window_acts_and_others_look_until_they_take_over(page, root):
    other = Page(page.port, "two")
    page.told("lease")
    other.told("queue")
    assert (page.acts, other.acts) == (True, False)
    refused = {
        "start": {"toml": config(root, root / "run"), "path": f"{root}/x.toml", "device": "cpu", "force": False},
        "write": {"toml": config(root, root / "run"), "path": f"{root}/x.toml", "device": "cpu", "force": False},
        "again": {"name": "run", "device": "cpu"},
        "act": {"name": "run", "what": "stop"},
        "move": {"entry": "x", "what": "up"},
        "settle": {"paused": True},
        "example": {"path": str(root)},
        "caption": {"toml": "", "set": 0, "file": "a.png", "before": "", "caption": "x"},
    }
    for what, question in refused.items():
        status, told = other.ask(what, **question)
        assert (status, "another window acts" in told["error"]) == (423, True), what
    assert sorted(path.name for path in root.iterdir() if path.name[0] != ".") == ["photos", "stand_in.py"]
    other.told("take")
    assert other.acts
    assert page.ask("settle", paused=True)[0] == 423
    assert other.told("settle", paused=True)["paused"] == "paused by you"


def test_a_window_that_is_gone_does_not_keep_the_others_from_acting():
    now = [0.0]
    lease = Lease(lambda: now[0])
    assert lease.holds("one")
    now[0] = 60.0
    assert not lease.holds("two")
    assert lease.holds("one")
    now[0] = 151.0
    assert lease.holds("two")
    assert not lease.holds("one")


def test_a_run_is_asked_continued_and_copied(page, root, made):
    run = made("root/run").folder
    (run / "lora.best.safetensors").write_bytes(b"the best")
    told = page.told("run", name="run")
    assert (told["goes_on"], told["state"], told["device"], told["devices"]) == (
        False,
        "done",
        "cpu",
        ["cuda:0", "cpu"],
    )
    assert [(each["path"], each["about"]) for each in told["loras"]] == [
        ("lora.best.safetensors", "best by validation: 0.225 at step 40"),
        ("lora.safetensors", "step 40"),
    ]
    assert "expected a run that goes on, got one that is done" in page.ask("act", name="run", what="save")[1]["error"]
    with OpenFolder.open(run) as folder:
        descriptor = folder.file(LOCK, os.O_RDWR)
    lock(descriptor)
    assert page.told("run", name="run")["goes_on"]
    for what in ("sample", "save", "stop"):  # nobody knows its process: it is asked, and no signal is sent
        assert page.told("act", name="run", what=what)["done"].endswith("after the present step")
        assert json.loads((run / name_of(what)).read_text()) == {"ask": what}
    assert "goes on already" in page.ask("again", name="run", device="cuda")[1]["error"]
    os.close(descriptor)
    for how in ("clone", "continue"):
        copy = page.told("copy", name="run", how=how)
        assert copy["folder"] == f"{run}-2"
        values = page.told("state", toml=copy["toml"])["values"]
        assert values["output.dir"] == f"{run}-2"
        assert values["train.continue_from"] == (str(run) if how == "continue" else "")
        assert (values["train.steps"], values["model.checkpoint"]) == ("80", "/secret/home/base.safetensors")
    text = (run / "config.toml").read_text().replace("/secret/home", str(root))
    (run / "config.toml").write_text(text)
    page.told("again", name="run", device="cpu")
    until(lambda: (root / "starts").exists())
    assert (root / "starts").read_text() == "run cpu\n"
    assert entry(page)["config"] == str(run / "config.toml")


def test_what_is_named_is_looked_up_and_never_a_path(page, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    for name in ("../outside", "/etc", "", "\ud800", "run\0", "x" * 9999):
        assert page.ask("act", name=name, what="stop")[0] == 400
        assert page.ask("act", entry=name, what="stop")[0] == 400
        assert page.ask("run", name=name)[0] == 400
        assert page.ask("copy", name=name, how="clone")[0] == 400
        assert page.ask("again", name=name, device="cpu")[0] == 400
        assert page.ask("move", entry=name, what="up")[0] == 400
    for question in ({"what": "kill"}, {"what": ["stop"]}, {"more": 1, "what": "stop"}):
        assert page.ask("act", **question)[0] == 400
    for folder in (tmp_path / "outside" / "run", root / "link" / "run", root):
        question = {"toml": config(root, folder), "path": f"{root}/x.toml", "device": "cpu", "force": True}
        assert page.ask("start", **question)[0] == 400
    for device in ("cuda:9", "tpu", "--help"):
        assert start(page, root, "x", device)[0] == 400
    assert not (root / "starts").exists()
    assert [*(tmp_path / "outside").iterdir()] == []
    assert isinstance(page.told("queue")["runs"], list)


def test_the_wild_names_of_a_damaged_queue_are_told_as_text(page, root):
    (Path(root) / "flame-train-queue.toml").write_text('paused = "\\u001b[2J"\nmore = "\\u0000"')
    told = page.told("queue")
    assert "expected one of after_failure, paused" in told["trouble"]
    assert page.ask("settle", paused=True)[0] == 400
