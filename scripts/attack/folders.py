"""A run folder in which each file is damaged in each way: a run that goes on there, or is refused by name, and soon.

A run of four steps is prolonged to six in a copy of its folder, once for each damage. Every command must end with 0, 3
or 6, a refusal must name what is damaged, and a run that ends must have the bytes of one in a folder without damage.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from forked import Ended, command, done
from kills import prepare, result, train

from flame_train.errors import shown
from flame_train.io.runstatus import state_of

NEWEST = "checkpoints/step-000004"
KEYS = ["--set", "schedule.name=constant", "--set", "sample.every=0"]  # a constant rate may be prolonged
HUGE = 1 << 40  # bytes of a file that has no blocks
DEEP = "[" * 100_000
SURROGATE = '{"\\ud800": "\\udfff"}'

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One hostile folder: what is damaged, how, and the words of which a refusal must have one."""

    about: str
    what: str
    damage: Callable[[Path], object]

    @property
    def names(self) -> tuple[str, ...]:
        """The file itself, or the folder or the kind of thing that it is known as."""
        parts = Path(self.what).parts
        return tuple(shown(part) for part in parts)


def _bit_flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes() or b"\0")
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _in_place(make: Callable[[Path], object]) -> Damage:
    """`make` where the file was."""

    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have a hundred characters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _elsewhere(path: Path) -> None:
    path.symlink_to(_outside(path))


def _outside(path: Path) -> Path:
    """A file beside the run folder, which nothing may touch."""
    (run,) = (parent for parent in path.parents if parent.name == "run")
    target = run.with_name("elsewhere")
    target.write_text("theirs")
    return target


ANY_FILE: dict[str, Damage] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "with a bit flipped": _bit_flipped,
    "with more behind it": lambda path: path.write_bytes(path.read_bytes() + b"\xff\n"),
    "4 KiB of NUL": lambda path: path.write_bytes(bytes(4096)),
    "bytes at random": lambda path: path.write_bytes(random.Random(0).randbytes(4096)),
    "of a terabyte": lambda path: os.truncate(path, HUGE),
    "a pipe": _in_place(os.mkfifo),
    "a folder": _in_place(Path.mkdir),
    "a socket": _in_place(_socket),
    "a device": _in_place(lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))),
    "a link to elsewhere": _in_place(_elsewhere),
    "a link to itself": _in_place(lambda path: path.symlink_to(path.name)),
}
FILES = (
    "config.toml",
    "status.json",
    "dataset.json",
    "log.jsonl",
    "lora.safetensors",
    ".lock",
    *(f"{NEWEST}/{name}" for name in ("MANIFEST.json", "state.json", "optimizer.safetensors", "lora.safetensors")),
)
JSON_TEXTS = {
    "nested 100,000 deep": DEEP,
    "an object nested 100,000 deep": '{"format":' * 100_000,
    "with lone surrogates": SURROGATE,
    "a list": "[]",
    "null": "null",
    "a number of 10,000 digits": '{"format": ' + "9" * 10_000 + "}",
    "an infinite format": '{"format": Infinity, "step": 1e999, "version": NaN}',
    "a format that is text": '{"format": "1", "version": ["\\u001b[2J"], "step": "\\u0000"}',
    "with a byte order mark": "\ufeff{}",
}
JSON_FILES = ("status.json", "dataset.json", f"{NEWEST}/MANIFEST.json", f"{NEWEST}/state.json")
LOG_LINES = {
    "an infinite step": '{"step": Infinity}',
    "a step beyond all numbers": '{"step": 1e999}',
    "a step that is no number": '{"step": NaN}',
    "an enormous step": '{"step": ' + "9" * 4000 + "}",
    "a step of 10,000 digits": '{"step": ' + "9" * 10_000 + "}",
    "a negative step": '{"step": -1}',
    "a step that is true": '{"step": true}',
    "a step that is text": '{"step": "4"}',
    "a step that is a fraction": '{"step": 4.5}',
    "no step": "{}",
    "deep nesting": DEEP,
    "a lone surrogate": '{"step": 4, "\\ud800": 1}',
    "the same step twice": '{"step": 4, "loss": 1}',
    "32 MiB on a line": '{"step": 4, "x": "' + "x" * (32 << 20) + '"}',
}
LISTED = {
    "a name with NUL": "a\0b",
    "a name that is a lone surrogate": "\ud800",
    "a way out": "../state.json",
    "an absolute name": "/etc/passwd",
    "an empty name": "",
    "a name of 5,000 characters": "x" * 5000,
    "a name that steers a terminal": "\x1b[2J",
    "a dot": ".",
}
ENTRIES = {
    "a size that is infinite": {"size": float("inf"), "sha256": "0"},
    "a size that is negative": {"size": -1, "sha256": "0"},
    "a size that is enormous": {"size": 10**4000, "sha256": "0"},
    "a hash that is a list": {"size": 365, "sha256": []},
    "no entry": None,
}
FOLDER_NAMES = {
    "a step of 40 digits": "step-" + "9" * 40,
    "a step of 250 digits": "step-" + "9" * 250,
    "a step of Arabic digits": "step-\u0660\u0660\u0660\u0660\u0660\u0669",
    "a step and a line end": "step-000009\n",
    "bytes that are no UTF-8": os.fsdecode(b"step-\xff\xfe"),
    "a temporary folder's name": ".tmp-9-0123456789abcdef",
    "step 0": "step-000000",
}


def _listed(entries: dict[str, object]) -> Damage:
    """Puts `entries` into the manifest's list."""

    def damage(path: Path) -> None:
        manifest = json.loads(path.read_bytes())
        manifest["files"] |= entries
        path.write_text(json.dumps(manifest))

    return damage


VOUCHED = ", which the manifest vouches for"


def _vouched_for(damage: Damage) -> Damage:
    """Damages a file, and has the manifest say that it must be so."""

    def both(path: Path) -> None:
        damage(path)
        raw = path.read_bytes()
        _listed({path.name: {"size": len(raw), "sha256": sha256(raw).hexdigest()}})(path.with_name("MANIFEST.json"))

    return both


def _written(text: str) -> Damage:
    return lambda path: path.write_text(text, encoding="utf-8")


def _with_line(line: str) -> Damage:
    return lambda path: path.write_text(path.read_text() + line + "\n")


def cases() -> Iterator[Case]:
    """Every hostile folder."""
    for what in FILES:
        for about, damage in ANY_FILE.items():
            yield Case(about, what, damage)
    for what in JSON_FILES:
        for about, text in JSON_TEXTS.items():
            yield Case(about, what, _written(text))
    for about, line in LOG_LINES.items():
        yield Case(about, "log.jsonl", _with_line(line))
    manifest = f"{NEWEST}/MANIFEST.json"
    for about, name in LISTED.items():
        yield Case(f"lists {about}", manifest, _listed({name: {"size": 0, "sha256": ""}}))
    for about, entry in ENTRIES.items():
        yield Case(f"lists {about}", manifest, _listed({"state.json": entry}))
    for name in ("state.json", "optimizer.safetensors", "lora.safetensors"):
        for about in ("empty", "cut in half", "with a bit flipped", "4 KiB of NUL", "bytes at random"):
            yield Case(f"{about}{VOUCHED}", f"{NEWEST}/{name}", _vouched_for(ANY_FILE[about]))
    for about, text in JSON_TEXTS.items():
        yield Case(f"{about}{VOUCHED}", f"{NEWEST}/state.json", _vouched_for(_written(text)))
    for about, line in LOG_LINES.items():
        waits = _vouched_for(lambda path, line=line: path.write_text(line + "\n"))  # type: ignore[misc]
        yield Case(f"waits with {about}", f"{NEWEST}/log.jsonl", waits)
    for about, name in FOLDER_NAMES.items():
        for kind, make in {"folder": Path.mkdir, "file": Path.touch}.items():
            yield Case(f"a {kind} with {about}", f"checkpoints/{name}", make)
    for what in ("checkpoints", NEWEST, "samples"):
        for about in ("a pipe", "a socket", "a device", "a link to elsewhere", "a link to itself"):
            yield Case(about, what, lambda path, about=about: _instead(path, ANY_FILE[about]))  # type: ignore[misc]


def _instead(path: Path, damage: Damage) -> None:
    """Something else where a folder was."""
    shutil.rmtree(path, ignore_errors=True)
    path.touch()
    damage(path)


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """Every case, however long that takes. Returns how often what happened, and what did not hold."""
    work, kept = folder / "work", folder / "kept"
    prepare(work)
    done(prolonged(work, 4))
    shutil.copytree(work / "run", kept)
    done(prolonged(work, 6))
    expected = result(work)
    outcomes, failures = Counter[str](), []
    for case in cases():
        shutil.rmtree(work / "run")
        shutil.copytree(kept, work / "run")
        case.damage(work / "run" / case.what)
        outcomes["folders"] += 1
        theirs = _outside(work / "run" / case.what)
        for name, ended in readers(work, case):
            outcomes[f"{name} ended with {ended.code}"] += 1
            failures += [f"{case.what} {case.about}: {name} {fault}" for fault in faults(ended, case)]
        if theirs.read_text() != "theirs":
            failures.append(f"{case.what} {case.about}: what is outside was written to")
        forged = case.about.endswith(VOUCHED)  # other numbers with their own hash: nothing can tell them from the run's
        if ended.code == 0 and not forged and result(work) != expected:
            failures.append(f"{case.what} {case.about}: the run ended in other bytes")
    return outcomes, failures


def prolonged(work: Path, steps: int, *more: str) -> list[str]:
    """The command that starts the run or prolongs it to so many steps."""
    return train(work, "--set", f"train.steps={steps}", *KEYS, *more)


def readers(work: Path, case: Case) -> Iterator[tuple[str, Ended]]:
    """What reads a run folder, the run itself last."""
    yield "state_of", command(lambda: state_of(work / "run"))
    if case.what.endswith(".safetensors"):
        yield "inspect", command(["inspect", str(work / "run" / case.what), "--json"])
    yield "train --dry-run", command(prolonged(work, 6, "--dry-run"))
    yield "train", command(prolonged(work, 6))


def faults(ended: Ended, case: Case) -> Iterator[str]:
    """What did not hold of one command."""
    if ended.code not in (0, 3, 6):
        yield f"ended with {ended.code}: {ended.said[-300:]}"
    elif ended.code and not any(name in ended.said for name in case.names):
        yield f"names nothing of it: {ended.said[-300:]}"
    if not all(line.isprintable() for line in ended.said.split("\n")):
        yield f"printed what steers a terminal: {ended.said!r}"
