"""A campaign over the window: questions, and files of the queue and of runs, with texts, paths and names damaged.

`FLAME_TEST_QUESTIONS=5000 pytest tests/show/test_wild_questions.py -m proof` asks so many.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter

import psutil
import pytest

from flame_train.io.requests import name_of
from flame_train.io.run_process import PROCESS
from flame_train.quickstart.drawings import write_images
from flame_train.ui.queue_file import QUEUE

from .conftest import until
from .test_queue import STAND_IN
from .test_window import QUESTIONS, TOKEN, Asker

_TEXTS = ("", "\0", "\ud800", "..", "../outside", "/etc/passwd", "~", "~root", "a" * 5000, "[" * 3000, "1e999", "nan")
_WORDS = ("--help", "; touch x", "$(touch x)", "`touch x`", "x\ny", "\x1b[2J", "<script>window.planted=1</script>")
_NAMES = ("run", "runs/run", "cuda:0", "cpu", "cuda:" + "9" * 30, "stop", "sample", "remove", "again", "go on", "wait")
WILD = (*_TEXTS, *_WORDS, *_NAMES, None, True, 0, -1, 1 << 70, 1e308, [], {}, ["x"], {"x": "y"})


def damaged(value, chosen, outside):
    """A value like that, with something wrong."""
    if isinstance(value, dict) and value and chosen.random() < 0.8:
        name = chosen.choice(list(value))
        return value | {name: damaged(value[name], chosen, outside)}
    if isinstance(value, str) and value and chosen.random() < 0.5:
        at = chosen.randrange(len(value))
        return value[:at] + chosen.choice(["", "\0", "\\", '"', "/..", "\n", "]", "é", value]) + value[at + 1 :]
    return chosen.choice([*WILD, str(outside), f"{outside}/x.toml", f"{outside}/run"])


@pytest.fixture
def asker(serve, made, tmp_path):
    """A window over a run, images and a queue, beside a folder that is none of its own but is linked to."""
    run = made("root/runs/run").folder
    root = tmp_path / "root"
    (root / "stand_in.py").write_text(STAND_IN)
    write_images(root / "photos", 12, 1)
    write_images(tmp_path / "outside", 12, 2)
    (tmp_path / "outside" / "x.toml").write_text(f'[output]\ndir = "{tmp_path}/outside/run"\n')
    (root / "link").symlink_to(tmp_path / "outside")
    (run / "end").write_text("0")
    command = [sys.executable, "-I", "-S", str(root / "stand_in.py")]
    return Asker(serve(root, token=TOKEN, window=True, devices=["cuda:0"], command=command), root)


def state_of(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_no_wild_question_or_file_does_harm(asker, tmp_path):
    chosen, outside, told = random.Random(int(os.environ.get("FLAME_TEST_SEED", "1"))), tmp_path / "outside", Counter()
    run, before = asker.root / "runs" / "run", state_of(outside)
    others = {each.pid for each in psutil.Process().children()}
    config = f'[model]\ncheckpoint = "{asker.root}/base.safetensors"\n[data]\npath = "{asker.root}/photos"\n'
    config += f'[output]\ndir = "{asker.root}/runs/new"\n'
    asked = {**QUESTIONS, "start": QUESTIONS["start"] | {"toml": config, "path": f"{asker.root}/x.toml", "force": True}}
    for what in ("run", "copy", "again", "act"):
        asked[what] = asked[what] | {"name": "run"}
    queue = f'after_failure = "go on"\npaused = ""\n[[runs]]\nid = "1"\nconfig = "{asker.root}/x.toml"\n'
    queue += f'folder = "{asker.root}/runs/new"\ndevice = "cuda"\nstate = "waiting"\n'
    queue += 'attempt = "a"\non = "cuda:0"\nsaid = ""\n'
    process = '{"attempt": "a", "pid": 1, "created": 5.0, "code": null}'
    for _ in range(int(os.environ.get("FLAME_TEST_QUESTIONS", "300"))):
        what = chosen.choice(list(asked))
        question = asked[what]
        for _ in range(chosen.randrange(4)):
            question = damaged(question, chosen, outside)
        for folder, name, text in (
            (asker.root, QUEUE, queue), (run, PROCESS, process), (run, name_of("stop"), '{"ask": "stop"}')
        ):  # fmt: skip
            if chosen.random() < 0.1:
                wild = damaged(text, chosen, outside)
                raw = (wild if isinstance(wild, str) else json.dumps(wild)).encode("utf-8", "surrogatepass")
                (folder / name).write_bytes(raw)
        status, raw = asker.send(f"/ask/{what}", json.dumps(question).encode())
        json.loads(raw)
        told[status] += 1
        assert status in (200, 400, 404, 409), (what, question, raw)
    assert state_of(outside) == before
    assert not list(asker.root.rglob("x")) + list(tmp_path.glob("x"))
    assert told[200] > 0
    print(dict(told))  # noqa: T201
    (asker.root / QUEUE).unlink(missing_ok=True)
    for file in asker.root.rglob(PROCESS):
        file.with_name("end").write_text("0")
    until(lambda: {each.pid for each in psutil.Process().children()} <= others)
