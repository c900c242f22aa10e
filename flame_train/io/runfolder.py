"""The folder of one run: its lock, resolved config, status, log, sample grids and checkpoints.

Opening the folder starts a run in it or continues its run; any other content is refused.
The lock is the kernel's, so it is gone with the process that held it, however that ended. The folder is held open and
all that is written goes below its handle: where its path leads elsewhere, another run may have that place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flame_train.disk.atomic_write import remove_stale, write_atomically
from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry, FolderLost, OpenFolder
from flame_train.disk.preflight import could_make_folder, disk_errors, make_folder, reading
from flame_train.disk.system import NONBLOCK, lock_soon
from flame_train.errors import OutputError
from flame_train.io import commit
from flame_train.io.requests import Kind, Requests
from flame_train.io.run_files import LARGEST, UNNAMED, Differences, examine, is_sample, refuse_links
from flame_train.io.runlog import (
    FORMAT,
    LOCK,
    LogFile,
    ending,
    mark_dead,
    read_status,
    record_of,
    refresh_status,
    step_of,
    write_status,
)
from flame_train.version import __version__

_LOG = logging.getLogger(__name__)

_LIVE_EVERY_S: Final = 1.0


class RunFolder:
    """An open run. Use as a context manager: leaving it writes the final status and releases the lock.

    `differences(old, found)` gets the `config.toml` and the checkpoint of the folder's run. It returns a table of the
    settings that forbid continuing it, or None. `name` is that of the LoRA's file, which a run may change.
    """

    def __init__(self, folder: Path, config: str, differences: Differences, name: str = "") -> None:
        self.folder = folder
        self.name = name
        self.step = 0
        self._saved = 0
        self._found: commit.Checkpoint | None = None
        self._config = config
        self._differences = differences
        self._open: OpenFolder | None = None
        self._lock: int | None = None
        self._log: LogFile | None = None
        self._requests: Requests | None = None
        self._live: dict[str, Any] = {}  # further figures of the status
        self._told = -math.inf  # when the status was last written for a step
        self._grids: dict[str, bytes] = {}  # those the disk had no room for, by their names

    def __enter__(self) -> Self:
        """Take the folder. Raises OutputError if it is in use, cannot be written or holds another run."""
        make_folder(self.folder)
        with reading(self.folder):
            self._open = OpenFolder.open(self.folder)
        try:
            with reading(self.folder):
                refuse_links(self._held, self.lora.stem)
                self._acquire()
                self._held.check()
                self._mend()
                self._found = self._examine(self._held)
            self._saved = self._found.step if self._found else 0
        except BaseException:
            self._release()
            raise
        try:
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _begin(self) -> None:
        """Writes the first file in a new run's folder."""
        self._requests = Requests(self._held)
        self.write_status("running")
        raw = self._config.encode()
        write_atomically(self._held / "config.toml", [raw], len(raw))
        commit.remove_stale(self._held / "checkpoints")
        with contextlib.suppress(OSError), self._held.folder("samples") as samples:
            remove_stale(samples)
        with self._held.errors(self.folder / "log.jsonl"):
            self._log = LogFile(self._held / "log.jsonl")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._log is not None:
                self._log.close()
            if not isinstance(error, FolderLost):
                self._write_grids()
            self._end(error)
        finally:
            self._release()

    def _end(self, error: BaseException | None) -> None:
        """Writes the final status. A folder that lies elsewhere now gets it there."""
        if isinstance(error, FolderLost):
            self._held.follow()
        try:
            self.write_status(*ending(error))
        except FolderLost as lost:
            self._held.follow()
            with contextlib.suppress(OutputError):
                self.write_status(*ending(lost))
            if error is None:
                raise
        except OutputError:
            if error is None:
                raise

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def samples(self) -> Path:
        """The folder of the sample grids."""
        return self.folder / "samples"

    @property
    def lora(self) -> Path:
        """The result."""
        return self.folder / f"{self.name or UNNAMED}.safetensors"

    def lora_beside(self, form: str) -> Path:
        """Returns the result once more, in another format."""
        return self.lora.with_suffix(f".{form}.safetensors")

    @property
    def best(self) -> Path:
        """The LoRA of the best validation."""
        return self.lora_beside("best")

    def lora_of(self, step: int) -> str:
        """Returns the name of a checkpoint's LoRA: with the step, so that it may be copied elsewhere as it is."""
        return f"{self.name}-{step:06d}.safetensors" if self.name else self.lora.name

    def place(self, path: Path) -> FolderEntry:
        """Gives a path right in this folder, to be written to. Raises FolderLost if the folder is gone."""
        self._held.check()
        return self._held / path.relative_to(self.folder).name

    def owned(self, name: str) -> Path:
        """Gives a folder of the run, such as "tensorboard", in which another library writes. Raises FolderLost."""
        return self.place(self.folder / name).path

    def config(self) -> str:
        """Returns the text of `config.toml`."""
        return (self.folder / "config.toml").read_text(encoding="utf-8")

    def sample(self, step: int, of_base: bool = False) -> Path:
        """Returns the sample grid of a step; `of_base`: the one that the base itself drew beside another model."""
        still, clip = (self.samples / f"step-{step:06d}{'-base' * of_base}.{ending}" for ending in ("png", "webp"))
        return clip if clip.name in self._grids or os.path.exists(clip) else still

    def write_sample(self, step: int, grid: bytes, of_base: bool = False) -> None:
        """Write the sample grid of a step, a PNG, or a WebP of clips.

        One that the disk has no room for waits, as lines of the log do.
        """
        ending = "webp" if grid.startswith(b"RIFF") else "png"
        self._grids[self.sample(step, of_base).with_suffix(f".{ending}").name] = grid
        self._write_grids()

    def has_sample(self, step: int) -> bool:
        """Tells whether the sample grid of a step is there, or waits for room."""
        return self.sample(step).name in self._grids or os.path.exists(self.sample(step))

    def _write_grids(self) -> None:
        for name, grid in list(self._grids.items()):
            try:
                fail_point("sample.before_write")
                with self._held.errors(self.samples / name), self._held.folder("samples", make=True) as samples:
                    write_atomically(samples / name, [grid], len(grid))
            except FolderLost:
                raise
            except (OutputError, OSError) as error:
                _LOG.warning("no sample grid yet: %s; it waits for room", error)
                return
            del self._grids[name]

    def resume(self) -> commit.Checkpoint | None:
        """Returns the checkpoint to continue from, or None in a new run. Cuts the log back to its step.

        Writes the data that waited for disk space when the checkpoint was made.
        """
        self.step = self._saved
        waited = b""
        with self._held.errors(self.folder / "log.jsonl"):
            if self._found is not None:
                with (
                    self._held.folder("checkpoints") as checkpoints,
                    checkpoints.folder(self._found.path.name) as checkpoint,
                ):
                    waited = checkpoint.read("log.jsonl", LARGEST) if checkpoint.lstat("log.jsonl") else b""
                    self._grids = {n: checkpoint.read(n, LARGEST) for n in checkpoint.names() if is_sample(n)}
            self._opened_log().cut(self.step, waited)
        self._write_grids()
        return self._found

    def inspect(self, leader: bool = False) -> commit.Checkpoint | None:
        """Returns the result of `resume`, without writing a file. Raises OutputError if the folder could not be opened.

        `leader`: another process of the same run has the folder open.
        """
        could_make_folder(self.folder)
        with reading(self.folder):
            try:
                held = OpenFolder.open(self.folder)
            except FileNotFoundError:
                return None
            with held:
                refuse_links(held, self.lora.stem)
                if not leader:
                    self._refuse_locked(held)
                return self._examine(held)

    def checkpoint(
        self,
        step: int,
        files: Mapping[str, commit.Content],
        keep: int,
        size: int | None = None,
        *,
        spare: Collection[int] = (),
    ) -> Path:
        """Makes the log durable, commits the checkpoint of `step` and notes it in the status; returns its folder.

        Args:
            files, keep, size, spare: as in `commit.commit`.

        Raises OutputError if the checkpoint cannot be written. Log and status only report: they cost a warning.
        """
        log = self._opened_log()
        log.sync()
        self._write_grids()
        waiting = {"log.jsonl": log.waiting} if log.waiting else {}
        place = self._held / "checkpoints"
        path = commit.commit(
            place, step, {**files, **waiting, **self._grids}, keep, size, spare=spare, lora_of=self.lora_of
        )
        self.step = self._saved = step
        try:
            self.write_status("running")
        except FolderLost:
            raise
        except OutputError as error:
            _LOG.warning("%s", error)
        return path

    def log(self, record: Mapping[str, Any], live: Mapping[str, Any] | None = None) -> None:
        """Append a line to `log.jsonl`. `record` must have `step`. A full disk delays lines; it never ends the run.

        `live` are further figures for the status, which is written anew here, once a second.

        Raises FolderLost.
        """
        self._held.check()
        self.step = int(record["step"])
        self._opened_log().append(record)
        self._live = {} if live is None else dict(live)
        if time.monotonic() - self._told >= _LIVE_EVERY_S:
            self._told = time.monotonic()
            refresh_status(self._held, self._status("running", None))

    def requests(self) -> set[Kind]:
        """Takes what `flame-train ask` wants of the run now."""
        assert self._requests is not None, "the run folder is not open"
        return self._requests.take()

    def losses(self, count: int) -> list[float]:
        """Returns the finite losses of the last `count` steps in the log."""
        with reading(self.folder / "log.jsonl"):
            return self._opened_log().losses(count)

    def write_report(self, name: str, raw: bytes) -> None:
        """Write a report about the run, whole or not at all. It only informs: no room for it costs a warning."""
        try:
            write_atomically(self.place(self.folder / name), [raw], len(raw))
        except FolderLost:
            raise
        except OutputError as error:
            _LOG.warning("%s", error)

    def last(self) -> Mapping[str, Any]:
        """Returns the log's line of the step that was reached; empty if there is none."""
        with reading(self.folder / "log.jsonl"):
            line = self._opened_log().last()
        return record_of(line) if step_of(line) == self.step else {}

    def write_status(self, state: str, exit_code: int | None = None) -> None:
        """Write `status.json`: running, done, interrupted or failed, with the exit code once there is one."""
        write_status(self._held, self._status(state, exit_code))

    def _status(self, state: str, exit_code: int | None) -> dict[str, Any]:
        return {
            "state": state,
            "exit_code": exit_code,
            "step": self.step,
            "saved": self._saved,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
            "format": FORMAT,
            **self._live,
        }

    @property
    def _held(self) -> OpenFolder:
        assert self._open is not None, "the run folder is not open"
        return self._open

    def _opened_log(self) -> LogFile:
        assert self._log is not None, "the run folder is not open"
        return self._log

    def _acquire(self) -> None:
        with disk_errors(self.folder / LOCK):
            self._lock = self._held.file(LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self._take(self._held, self._lock)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._open is not None:
            self._open.close()
            self._open = None

    def _refuse_locked(self, folder: OpenFolder) -> None:
        """Does as `_acquire` for a folder with a run, without writing a file."""
        try:
            descriptor = folder.file(LOCK, os.O_RDONLY | NONBLOCK)
        except OSError:
            return  # there was none yet, or `_acquire` raises its error
        try:
            self._take(folder, descriptor, shared=True)
        finally:
            os.close(descriptor)

    def _take(self, folder: OpenFolder, descriptor: int, *, shared: bool = False) -> None:
        """Raises OutputError if another run has the lock, or the disk has no locks."""
        try:
            lock_soon(descriptor, shared=shared)
        except BlockingIOError:
            holder = read_status(folder)
            raise OutputError(
                f"{self.folder}: another run is writing here (process {holder.get('pid', 'unknown')} on "
                f"{holder.get('host', 'unknown host')}); wait for it, or set output.dir to another folder"
            ) from None
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the folder cannot be locked ({error.strerror}); set output.dir to a local disk"
            ) from None

    def _mend(self) -> None:
        """Marks a run that was killed as dead: it could not write how it ended."""
        status = read_status(self._held)
        if status.get("state") == "running" and "pid" in status:
            with contextlib.suppress(OutputError):
                write_status(self._held, mark_dead(status))

    def _examine(self, held: OpenFolder) -> commit.Checkpoint | None:
        return examine(held, self.folder, self.lora.name, self._differences)
