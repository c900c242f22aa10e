"""The queue: starts runs on the devices that are free, sees how they end, and goes on or waits, as it was told.

A run is noted as started, with a new attempt's name, before its process is begun (`io/run_process.py`). Whoever has
the queue after a kill looks at what the run folder says of that attempt: it goes on, has ended, was killed, or never
began and is begun now. So nothing is lost, and nothing is started twice. Nothing is started that could not be noted.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.roots import GIVEN, Roots, within
from flame_train.disk.system import lock
from flame_train.errors import ConfigError, FlameError, OutputError, lines_shown, shown
from flame_train.io import run_process as process
from flame_train.io.run_output import why
from flame_train.io.runlog import is_locked

from .draft import look
from .queue_file import WAIT, Book, Entry, is_device, read_queue, write_queue

_LOCK: Final = ".flame-train-queue.lock"
_EVERY_S: Final = 0.5
_GONE: Final = "this run is not in the queue any more"
_NO_DEVICE: Final = "it waits for a device that this window has not"
_STOPPED: Final = (129, 130, 138, 143)  # 128 + a signal that a run saves on
_LARGEST: Final = 1 << 20
COMMAND: Final = (sys.executable, "-P", "-m", "flame_train")  # -P: no module of the present folder


class Queue:
    """The queue below some roots, whose file lies in the first. One process at a time has it, by a lock of the kernel.

    Args:
        roots: where configs and run folders may lie.
        devices: each has one run at a time: "cuda:0" and so on. Beside them one run goes on the CPU.
        command: what starts the program.
    """

    def __init__(self, roots: Roots, devices: Sequence[str], command: Sequence[str] = COMMAND) -> None:
        self._roots, self._command = roots, tuple(command)
        self.devices = tuple(dict.fromkeys((*devices, "cpu")))
        self._lock: int | None = None
        self._one = threading.RLock()
        self._begun: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # with their devices
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="queue", daemon=True)

    # ---- what the pages ask

    def told(self) -> dict[str, Any]:
        """Returns the queue for the page: its runs, whether it waits, and what is wrong with it."""
        with self._one:
            try:
                with self._opened() as folder:
                    book, trouble = read_queue(folder), self._trouble
            except (FlameError, OSError) as error:
                book, trouble = Book(), str(error)
        lacking = {each.id for each in book.runs if each.state == "waiting" and not self._fitting(each.device)}
        runs = [replace(each, said=_NO_DEVICE) if each.id in lacking else each for each in book.runs]
        told = asdict(replace(book, runs=tuple(runs)))
        return told | {"devices": list(self.devices), "trouble": lines_shown(trouble)}

    def add(self, config: Path, folder: Path, device: str) -> str:
        """Puts a run at the end, and returns its id. Raises ConfigError where it waits or goes on already."""
        if not is_device(device) or not self._fitting(device):
            listed = ", ".join(dict.fromkeys(self.devices))
            raise ConfigError(f"{shown(device)}: expected a device of this machine: {listed}")
        if folder in self._roots.folders:
            raise ConfigError(
                f"{folder}: expected a folder below those that this window was started for: "
                "a run has files beside its folder too"
            )
        for path in (config, folder):
            if str(path).encode(errors="replace").decode() != str(path):
                raise ConfigError(f"{shown(path)}: expected a name in UTF-8, for the queue's file holds no other")
        entry = Entry(secrets.token_hex(4), str(config), str(folder), device)
        with self._changing() as book:
            same = [each for each in book.runs if each.folder == entry.folder]
            if any(each.state in ("waiting", "started") for each in same):
                raise ConfigError(f"{folder}: this run is in the queue already")
            if self._goes_on(entry):
                raise ConfigError(f"{folder}: this run goes on already")
            self._write(replace(book, runs=(*(each for each in book.runs if each not in same), entry)))
        self.step()
        return entry.id

    def entry(self, name: str) -> Entry:
        """Returns a run of the queue by its id. Raises ConfigError where it is not there any more."""
        with self._one, self._opened() as folder:
            found = next((each for each in read_queue(folder).runs if each.id == name), None)
        if found is None:
            raise ConfigError(_GONE)
        return found

    def change(self, name: str, what: str) -> None:
        """Moves a run "up", has it wait "again", or takes it out: "remove". Raises ConfigError where it goes on."""
        with self._changing() as book:
            runs, at = list(book.runs), next((n for n, each in enumerate(book.runs) if each.id == name), -1)
            if at < 0:
                raise ConfigError(_GONE)
            entry = runs[at]
            known = entry.attempt in self._begun or self._goes_on(entry)
            if entry.state == "started" and (known or what != "remove"):
                raise ConfigError("this run goes on; stop it first")
            if what == "up":
                runs.insert(max(at - 1, 0), runs.pop(at))
            elif what == "again":
                runs[at] = replace(entry, state="waiting", attempt="", on="", said="")
            else:
                runs.pop(at)
            self._write(replace(book, runs=tuple(runs)))
        self.step()

    def settle(self, after_failure: str | None = None, paused: str | None = None) -> None:
        """Says what is done after a failure, or pauses and goes on."""
        with self._changing() as book:
            book = book if after_failure is None else replace(book, after_failure=after_failure)
            self._write(book if paused is None else replace(book, paused=paused))
        self.step()

    @contextmanager
    def _changing(self) -> Iterator[Book]:
        with self._one, self._opened() as folder:
            if not self._owns(folder):
                raise OutputError(self._trouble)
            yield read_queue(folder)

    # ---- what it does by itself

    @contextmanager
    def working(self) -> Iterator[None]:
        """Works in a thread of its own meanwhile. Runs go on when it ends."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
            with self._one:
                if self._lock is not None:
                    os.close(self._lock)
                self._lock = None

    def _work(self) -> None:
        while not self._ended.is_set():
            self.step()
            self._ended.wait(_EVERY_S)

    def step(self) -> None:
        """Sees which runs have ended, and starts those that can. What is wrong is told on the page, and tried again."""
        with self._one, within(self._roots):
            try:
                with self._opened() as folder:
                    if self._owns(folder):
                        self._trouble = ""
                        self._step(read_queue(folder))
            except Exception as error:  # whatever it is, the next look may go well, and the page tells it
                self._trouble = str(error) or type(error).__name__

    def _step(self, book: Book) -> None:
        seen = replace(book, runs=tuple(map(self._seen, book.runs)))
        known = {each.attempt for each in seen.runs}  # others were taken out by hand
        self._begun = {name: each for name, each in self._begun.items() if name in known or each[0].poll() is None}
        pairs = zip(book.runs, seen.runs, strict=True)
        failed = [now for before, now in pairs if now.state == "failed" != before.state]
        if failed and seen.after_failure == WAIT:
            seen = replace(seen, paused=f"{Path(failed[0].folder).name} failed")
        if seen != book:
            self._write(seen)
        free = Counter(self.devices) - Counter(each.on for each in seen.runs if each.state == "started")
        free -= Counter(on for name, (_, on) in self._begun.items() if name not in known)
        for at, entry in enumerate(seen.runs):
            device = next((each for each in self._fitting(entry.device) if free[each] > 0), None)
            if entry.state != "waiting" or seen.paused or device is None:
                continue
            wrong = self._refusal(entry)
            now = replace(entry, state="started", attempt=secrets.token_hex(8), on=device, said="")
            now = now if not wrong else replace(entry, state="failed", said=wrong)
            seen = replace(seen, runs=(*seen.runs[:at], now, *seen.runs[at + 1 :]))
            if wrong and seen.after_failure == WAIT:
                seen = replace(seen, paused=f"{Path(entry.folder).name} failed")
            fail_point("queue.before_note")
            self._write(seen)
            fail_point("queue.noted")
            if not wrong:
                free[device] -= 1
                self._begin(now)
                fail_point("queue.begun")

    def _fitting(self, device: str) -> list[str]:
        """Returns the devices that a run for `device` may have."""
        return [each for each in self.devices if each == device or (device == "cuda" and each.startswith("cuda:"))]

    def _refusal(self, entry: Entry) -> str:
        """Returns why a run may not start; "": it may. Whoever wrote into the file named these paths."""
        try:
            place = self._roots.place(entry.config)
            if place.suffix != ".toml":
                return lines_shown(f"{place}: expected a config that ends in .toml")
            with self._roots.entry(str(place)) as file:
                raw = file.folder.read(file.name, _LARGEST)
            problems = look(raw.decode(errors="replace"), self._roots)[1]
            if problems:
                return lines_shown(f"{place}: {problems[0].key}: {problems[0].message}")
            with self._roots.folder(entry.folder, make=True):
                return "" if self._roots.place(entry.folder) not in self._roots.folders else "its folder is a root"
        except (FlameError, OSError) as error:
            return lines_shown(str(error))

    def _begin(self, entry: Entry) -> None:
        """Starts the process of a started run, unless it was begun already."""
        folder = self._roots.place(entry.folder)
        root = next(root for root in self._roots.folders if folder.is_relative_to(root))
        config = self._roots.place(entry.config)
        words = ["train", "--config", str(config), "--output", str(folder), "--device", entry.on]
        given = {GIVEN: json.dumps(list(map(str, self._roots.folders)))}
        begun = process.start(root, folder, process.Kept(entry.attempt, on=entry.on), [*self._command, *words], given)
        self._begun[entry.attempt] = begun, entry.on

    def _seen(self, entry: Entry) -> Entry:
        """Returns a run as it stands now. A started one that never began is begun; one that waits may go on already.

        The latter is what an editor leaves that wrote an older text of the file.
        """
        if entry.state == "waiting":
            kept = self._look(entry)
            goes_on = kept.alive and kept.on in self.devices
            return replace(entry, state="started", attempt=kept.attempt, on=kept.on, said="") if goes_on else entry
        if entry.state != "started":
            return entry
        begun = self._begun.get(entry.attempt, (None, ""))[0]
        ended = begun is not None and begun.poll() is not None  # asked first: what it wrote is there then
        kept = self._look(entry)
        if kept.attempt != entry.attempt:
            if ended:
                return replace(entry, state="failed", said="its process could not be noted there")
            return entry if begun is not None else self._begin_where_allowed(entry)
        if kept.alive or (kept.code is None and begun is not None and not ended):
            return entry
        if begun is not None:
            self._begun.pop(entry.attempt)[0].wait()  # it has noted the end, and ends
        if kept.code is None:
            return replace(entry, state="failed", said="its process was killed; it goes on from its last checkpoint")
        if kept.code in _STOPPED:
            return replace(entry, state="stopped", said=f"stopped, with {kept.code}")
        if kept.code:
            said = kept.fault or why(self._roots.place(entry.folder))
            return replace(entry, state="failed", said=f"ended with {kept.code} {said}")
        return replace(entry, state="done")

    def _begin_where_allowed(self, entry: Entry) -> Entry:
        """Begins a run that was noted as started and never began; returns it as it stands then, refused or not."""
        try:
            self._roots.place(entry.folder)
        except ConfigError as error:  # it may go on there: a window for more folders began it
            return replace(entry, said=str(error))
        wrong = self._refusal(entry)
        if wrong:
            return replace(entry, state="failed", said=wrong)
        self._begin(entry)
        return entry

    def _goes_on(self, entry: Entry) -> bool:
        """Tells whether a process trains in the run's folder, whoever started it."""
        try:
            with self._roots.folder(entry.folder) as folder:
                return process.look(folder).alive or is_locked(folder)
        except (FlameError, OSError):
            return False

    def _look(self, entry: Entry) -> process.Kept:
        try:
            with self._roots.folder(entry.folder) as folder:
                return process.look(folder)
        except (FlameError, OSError):
            return process.Kept()

    @contextmanager
    def _opened(self) -> Iterator[OpenFolder]:
        with self._roots.folder(str(self._roots.folders[0])) as folder:
            yield folder

    def _write(self, book: Book) -> None:
        with self._opened() as folder:
            write_queue(folder, book)

    def _owns(self, folder: OpenFolder) -> bool:
        """Tells whether this process has the queue, which it takes where nobody has it."""
        if self._lock is not None:
            return True
        descriptor = folder.plain_file(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            lock(descriptor)
            self._lock = descriptor
            return True
        except BlockingIOError:
            os.close(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise OutputError(
                f"{folder.path}: its disk has no locks of files ({error}); begin with a folder of another disk first"
            ) from None
        self._trouble = f"another `flame-train ui` has the queue of {folder.path}; this one only shows it"
        return False
