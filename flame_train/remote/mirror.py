"""Copies a run folder to a store while the run goes on, in a thread of its own.

The thread compares the run folder with what it knows the store to hold, and sends the rest. It sends the log first,
then the newest checkpoint, whose manifest comes last. It holds a checkpoint's files open, so that one that is pruned
meanwhile still arrives whole. It retries what failed until it is closed. A run waits for it only at the run's end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import folder_below
from flame_train.errors import RemoteError
from flame_train.io.commit import MANIFEST, is_checkpoint
from flame_train.io.run_files import is_sample
from flame_train.io.runlog import STATUS

from .copy_layout import (
    CHECKPOINTS,
    CONFIG,
    LARGEST,
    LOG,
    SAMPLES,
    Manifest,
    folder_of,
    manifest_in,
    parsed,
    remove_checkpoint,
    steps_in,
)
from .faults import Full
from .lease import Lease, LeaseLost
from .store import Abandoned, Store

_LOG = logging.getLogger(__name__)

_AHEAD: Final = 2  # checkpoints that may be missing there without a word
_QUIET: Final = 60.0  # seconds between two warnings
_LONGEST_PAUSE: Final = 30.0
_REPORTS: Final = (
    CONFIG,
    "dataset.json",
    "dataset.jpg",
    "controls.png",
    "images.json",
    "report.html",
    "loss.png",
)


class Mirror:
    """The copy of `folder` in `store`. A context manager: within, it sends what `notice` announces.

    `keep` says how many of the newest checkpoints stay there, beside those that are here; 0: all of them.
    """

    def __init__(self, store: Store, folder: Path, keep: int, lease: Lease) -> None:
        self._store, self._folder, self._keep, self._lease = store, folder, keep, lease
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of change of what was sent, by name
        self._there: set[int] = set()  # steps of checkpoints that are whole there, as this process knows
        self._left_out: set[int] = set()  # those here that are damaged
        self._made: list[int] = []
        self._wake = threading.Condition()
        self._asked = self._done = 0
        self._closing = self._given_up = self._cleared = False
        self._failure: RemoteError | None = None
        self._warned = -_QUIET
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._wake:
            self._given_up = True
            self._wake.notify_all()

    def checkpoint(self, step: int) -> None:
        """Sends a checkpoint that is on the disk. Warns where more than two of them are not in the store yet."""
        self._made.append(step)
        newest = max(self._there, default=0)
        behind = sum(number > newest for number in self._made)
        if behind > _AHEAD:
            had = f"has step {newest}" if newest else "has no checkpoint"
            _LOG.warning("%s %s; %d later ones are on this machine alone", self._store, had, behind)
        self.notice()

    def check(self) -> None:
        """Raises LeaseLost if another machine trains this run now."""
        if self._lease.lost is not None:
            raise self._lease.lost

    def notice(self) -> None:
        """Wakes the thread: something is new. Returns at once. Raises LeaseLost if another machine trains this run."""
        self.check()
        with self._wake:
            self._asked += 1
            self._wake.notify_all()

    def finish(self, seconds: float) -> None:
        """Waits until the store has all that is here. Raises RemoteError if it has not after `seconds`."""
        with self._wake:
            self._asked += 1
            self._closing = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._done == self._asked or self._lease.lost is not None, seconds)
            if self._done == self._asked:
                return
        if self._lease.lost is not None:
            raise self._lease.lost
        why = self._failure or RemoteError(f"{self._store}: {seconds:.0f} s were too few for the upload")
        raise RemoteError(
            f"{why}; not all of {self._folder} is there, nothing is lost here: start the same command again to send "
            "the rest, with --remote-wait SECONDS for more time"
        )

    def _run(self) -> None:
        pause = 1.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._given_up or self._asked != self._done)
                request = self._asked
            if self._given_up or self._lease.lost is not None:
                return
            try:
                self._sync()
            except (Abandoned, LeaseLost):
                return
            except Exception as error:
                self._fail(error)
                if isinstance(error, Full):
                    self._make_room()
                with self._wake:
                    closing = self._closing
                    self._wake.wait_for(lambda: self._given_up or self._closing != closing, pause)  # noqa: B023
                    pause = min(2 * pause, 2.0 if self._closing else _LONGEST_PAUSE)
                continue
            pause = 1.0
            with self._wake:
                if self._failure is not None:
                    _LOG.info("%s: has all that is here again", self._store)
                self._failure, self._done = None, request
                self._wake.notify_all()

    def _fail(self, error: Exception) -> None:
        unknown = f"{self._store}: {type(error).__name__} while uploading"
        self._failure = error if isinstance(error, RemoteError) else RemoteError(unknown)
        if time.monotonic() - self._warned >= _QUIET:
            self._warned = time.monotonic()
            _LOG.warning("%s; the run goes on, and what is missing there is sent later", self._failure)

    def _sync(self) -> None:
        """Sends what is new: a status first, by which the copy is known as a run; checkpoints with the log before."""
        self._clear()
        self._send_changed(STATUS)
        for name in _REPORTS:
            self._send_changed(name)
        for name in sorted(filter(is_sample, _names(self._folder / SAMPLES))):
            self._send_changed(f"{SAMPLES}/{name}")
        while (step := self._next()) is not None:
            self._send_log()
            self._send_checkpoint(step)
            self._prune()  # before the next is sent: it may need the room
        self._send_log()
        for name in sorted(name for name in _names(self._folder) if name.endswith(".safetensors")):
            self._send_changed(name)
        self._prune()
        self._send_changed(STATUS)

    def _clear(self) -> None:
        """Removes, once, what uploads of earlier processes have left half-written."""
        if not self._cleared:
            for folder in ("", SAMPLES, *map(folder_of, steps_in(self._store))):
                self._store.remove_partial(folder)
            self._cleared = True

    def _next(self) -> int | None:
        """Finds the newest whole checkpoint here that is not there."""
        return next((step for step in _steps(self._folder) if step not in self._there | self._left_out), None)

    def _opened(self, name: str) -> IO[bytes]:
        """Returns a plain file below the run folder, to be read. Raises OSError: also where a link leads elsewhere."""
        *folders, last = name.split("/")
        with folder_below(self._folder, *folders) as folder:
            return folder.reading(last)

    def _send_changed(self, name: str) -> None:
        """Sends a file that was written since it was sent last; nothing where there is none."""
        try:
            with self._opened(name) as file:
                stat = os.fstat(file.fileno())
                if self._sent.get(name) != (stat.st_size, stat.st_mtime_ns):
                    self._lease.check()
                    self._store.upload(name, file, self._is_given_up)
                    self._sent[name] = (stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            return

    def _send_log(self) -> None:
        """Sends the whole lines of the log, which has more with each step."""
        try:
            with self._opened(LOG) as file:
                size = _end_of_lines(file)
                if self._sent.get(LOG) != (size, 0):
                    self._lease.check()
                    self._store.upload(LOG, _Part(file, size), self._is_given_up)
                    self._sent[LOG] = (size, 0)
        except FileNotFoundError:
            return

    def _send_checkpoint(self, step: int) -> None:
        """Sends a checkpoint, its manifest last; leaves out one that is damaged here, or was pruned meanwhile."""
        with ExitStack() as opened:
            try:
                folder = opened.enter_context(folder_below(self._folder, *folder_of(step).split("/")))
                manifest = parsed(folder.read(MANIFEST, LARGEST), step, str(folder.path))
                names = manifest.files if manifest is not None else {}
                files = {name: opened.enter_context(folder.reading(name)) for name in names}
            except FileNotFoundError:
                manifest, files = None, {}
            sent = manifest is not None and self._send_files(manifest, files)
        (self._there if sent else self._left_out).add(step)

    def _send_files(self, manifest: Manifest, files: Mapping[str, IO[bytes]]) -> bool:
        """Sends the files of the manifest, then that. Returns whether they are its files and are there now."""
        folder, there = folder_of(manifest.step), manifest_in(self._store, manifest.step)
        if there is not None and there.raw == manifest.raw:
            return True
        if there is not None:
            remove_checkpoint(self._store, manifest.step)
        for name, file in files.items():
            self._lease.check()
            if self._store.upload(f"{folder}/{name}", file, self._is_given_up) != manifest.files[name][1]:
                _LOG.warning("%s: does not match its SHA-256, so this checkpoint is not sent", self._folder / folder)
                return False
            fail_point("remote.after_file")
        self._lease.check()
        fail_point("remote.before_manifest")
        self._store.write(f"{folder}/{MANIFEST}", manifest.raw)
        fail_point("remote.after_manifest")
        return True

    def _prune(self) -> None:
        """Removes what was pruned here, but for the newest `keep`; and what an upload that was killed has left."""
        here = _steps(self._folder)
        if not here or not self._keep:
            return
        there = steps_in(self._store)
        earlier = [step for step in there if step <= here[0]]
        for step in there:
            if step not in here and step not in earlier[: self._keep]:
                self._lease.check()
                fail_point("remote.before_prune")
                remove_checkpoint(self._store, step)
                self._there.discard(step)

    def _make_room(self) -> None:
        """Removes what has no manifest: files of a checkpoint that found no room take it from one that would fit."""
        with suppress(RemoteError):
            for step in steps_in(self._store):
                if step not in self._there and manifest_in(self._store, step) is None:
                    self._lease.check()
                    remove_checkpoint(self._store, step)

    def _is_given_up(self) -> bool:
        return self._given_up or self._lease.lost is not None


class _Part:
    """The first bytes of a file that grows."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size
        file.seek(0)

    def read(self, size: int, /) -> bytes:
        chunk = self._file.read(min(size, self._left))
        self._left -= len(chunk)
        return chunk


def _end_of_lines(file: IO[bytes]) -> int:
    """Returns the length of a text up to its last line's end; a line has at most 64 KiB."""
    size = os.fstat(file.fileno()).st_size
    begin = max(0, size - (1 << 16))
    file.seek(begin)
    return begin + file.read(size - begin).rfind(b"\n") + 1


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _steps(folder: Path) -> list[int]:
    """Lists the checkpoints of a run folder, newest first."""
    names = filter(is_checkpoint, _names(folder / CHECKPOINTS))
    return sorted((int(name.removeprefix("step-")) for name in names), reverse=True)
