"""The folder of one run: its lock, resolved config, status, log and checkpoints.

Opening the folder either starts a run in it or continues the one it holds; nothing else may be in its place.
The lock is the kernel's, so it is gone with the process that held it, however that ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flame_train import __version__
from flame_train.errors import Interrupted, OutputError, exit_status
from flame_train.io import commit
from flame_train.io.durable import sweep_files, write_durably
from flame_train.io.failpoint import hit
from flame_train.io.files import could_make_folder, disk_errors, make_folder

_LOG = logging.getLogger(__name__)

_STATUS_BYTES = 512  # a status is filled up to a multiple of them, so that the next one is as long
_OURS = ("config.toml", "lora.safetensors", "checkpoints", "log.jsonl")


class RunFolder:
    """An open run. Use as a context manager: leaving it writes the final status and releases the lock.

    `differences(old, found)` is given the `config.toml` and the checkpoint of the run that the folder holds, and
    returns a table of the settings that forbid continuing it, or None.
    """

    def __init__(
        self, folder: Path, config: str, differences: Callable[[str, commit.Found | None], str | None]
    ) -> None:
        self.folder = folder
        self.step = 0
        self._saved = 0
        self._found: commit.Found | None = None
        self._config = config
        self._differences = differences
        self._lock: int | None = None
        self._log: LogFile | None = None

    def __enter__(self) -> Self:
        """Take the folder. Raises OutputError if it is in use, cannot be written or holds another run."""
        make_folder(self.folder)
        self._acquire()
        try:
            self._found = self._examine()
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
        """What is written first into a folder that this run may have."""
        self.write_status("running")
        _write_text(self.folder / "config.toml", self._config)
        commit.sweep(self.checkpoints)
        for folder in (self.folder, self.samples):
            sweep_files(folder)
        self._log = LogFile(self.folder / "log.jsonl")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()
        try:
            self.write_status(*_ending(error))
        except OutputError:
            if error is None:
                raise
        finally:
            self._release()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def samples(self) -> Path:
        """The folder of the sample grids."""
        return self.folder / "samples"

    def sample(self, step: int) -> Path:
        """The sample grid of a step."""
        return self.samples / f"step-{step:06d}.png"

    @property
    def lora(self) -> Path:
        """The result."""
        return self.folder / "lora.safetensors"

    def lora_beside(self, form: str) -> Path:
        """The result once more, in another format."""
        return self.lora.with_suffix(f".{form}.safetensors")

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's events."""
        return self.folder / "tensorboard"

    def resume(self) -> commit.Found | None:
        """The checkpoint to continue from, or None in a new run. Cuts the log back to its step."""
        self.step = self._saved
        self._opened_log().truncate(self.step)
        return self._found

    def look(self) -> commit.Found | None:
        """What `resume` would return, with nothing written. Raises OutputError if the folder could not be opened."""
        could_make_folder(self.folder)
        self._refuse_locked()
        return self._examine()

    def checkpoint(
        self, step: int, files: Mapping[str, commit.Content], keep: int, size: int | None = None
    ) -> Path:  # fmt: skip
        """Make the log durable, commit the checkpoint of `step`, and note the step in the status.

        Raises OutputError if the checkpoint cannot be written. Log and status only report: they cost a warning.
        """
        self._opened_log().sync()
        path = commit.commit(self.checkpoints, step, files, keep, size)
        self.step = self._saved = step
        try:
            self.write_status("running")
        except OutputError as error:
            _LOG.warning("%s", error)
        return path

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to `log.jsonl`. `record` must have `step`. A full disk costs lines, never the run."""
        self.step = int(record["step"])
        self._opened_log().append(record)

    def last(self) -> Mapping[str, Any]:
        """The log's line of the step that was reached; empty if there is none, or it was lost."""
        with disk_errors(self.folder / "log.jsonl"):
            *_, line = [b"", *(self.folder / "log.jsonl").read_bytes().splitlines()]
        return json.loads(line) if _step_of(line) == self.step else {}

    def write_status(self, state: str, exit_code: int | None = None) -> None:
        """Write `status.json`: running, done, interrupted or failed, with the exit code once there is one.

        On a disk without room the file that is there is written over: its size is the same.
        """
        status = {
            "state": state,
            "exit_code": exit_code,
            "step": self.step,
            "saved": self._saved,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
        }
        text, path = json.dumps(status, indent=1), self.folder / "status.json"
        text += " " * (-(len(text) + 1) % _STATUS_BYTES) + "\n"
        try:
            _write_text(path, text)
        except OutputError:
            if not _written_over(path, text.encode()):
                raise

    def _opened_log(self) -> LogFile:
        assert self._log is not None, "the run folder is not open"
        return self._log

    def _acquire(self) -> None:
        with disk_errors(self.folder / ".lock"):
            self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(self._lock, fcntl.LOCK_EX)
        except OutputError:
            self._release()
            raise

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_locked(self) -> None:
        """As `_acquire` of a folder that another run has, but nothing is written."""
        try:
            lock = os.open(self.folder / ".lock", os.O_RDONLY)
        except OSError:
            return  # none was there yet; or `_acquire` will tell what it meets
        try:
            self._take(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def _take(self, lock: int, kind: int) -> None:
        """Raises OutputError if another run has the lock, or the disk has no locks."""
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._held() from None
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the folder cannot be locked ({error.strerror}); set output.dir to a local disk"
            ) from None

    def _held(self) -> OutputError:
        holder = _read_status(self.folder)
        return OutputError(
            f"{self.folder}: another run is writing here (process {holder.get('pid', 'unknown')} on "
            f"{holder.get('host', 'unknown host')}); wait for it, or set output.dir to another folder"
        )

    def _examine(self) -> commit.Found | None:
        """The checkpoint to continue from. Refuses what is no run, another run, and one that lost what it needs."""
        present = [name for name in _OURS if (self.folder / name).exists()]
        if not (self.folder / "status.json").exists():
            if present:
                raise OutputError(
                    f"{self.folder}: expected a new folder or one that holds a run, but found {present[0]} "
                    "without status.json, and would overwrite it; set output.dir to another folder"
                )
            return None
        found = commit.newest(self.checkpoints)
        if "config.toml" in present:
            self._refuse_differences(found)
        elif present:  # a run that was killed before its first line wrote neither
            raise OutputError(
                f"{self.folder}: its config.toml is gone, so nobody knows whether this config continues the run that "
                "it holds; put it back, or set output.dir to another folder for a new run"
            )
        if found is None and self._has_saved():
            raise OutputError(
                f"{self.folder}: its checkpoints are gone, and the run would start anew over what it left; put them "
                "back, set output.dir to another folder, or remove this one"
            )
        return found

    def _has_saved(self) -> bool:
        """Whether the run was far enough to have a checkpoint."""
        status = _read_status(self.folder)
        saved = status.get("saved", status.get("step") if status.get("state") == "done" else 0)
        return bool(saved) or self.lora.exists()

    def _refuse_differences(self, found: commit.Found | None) -> None:
        config = self.folder / "config.toml"
        with disk_errors(config):
            table = self._differences(config.read_text(encoding="utf-8", errors="replace"), found)
        if table is not None:
            raise OutputError(
                f"{self.folder}: holds a run with other settings, which change its result:\n{table}\n"
                "set them back to continue that run, or set output.dir to another folder for a new one"
            )


class LogFile:
    """`log.jsonl`, appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        with disk_errors(path):
            self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line at once; NaN and infinity, which JSON has not, as null.

        A disk that has no room for it costs the line and one warning.
        """
        line = json.dumps({name: _finite(value) for name, value in record.items()}).encode() + b"\n"
        try:
            hit("log.append")
            written = self._file.write(line)
            if written < len(line):
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("%s: %s; lines are being lost", self.path, error.strerror)
            self._warned = True

    def truncate(self, step: int) -> None:
        """Drop every line after `step`, and a last line that was cut short."""
        good = 0
        with disk_errors(self.path):
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n") or _step_of(line) > step:
                        break
                    good += len(line)
            self._file.truncate(good)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_text(path: Path, text: str) -> None:
    raw = text.encode()
    write_durably(path, [raw], len(raw))


def _written_over(path: Path, raw: bytes) -> bool:
    """Whether `raw` could be put into the file of just as many bytes that is there."""
    try:
        with path.open("r+b") as file:
            return os.fstat(file.fileno()).st_size == len(raw) and file.write(raw) == len(raw)
    except OSError:
        return False


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # not a line of ours: cut from here on


def _ending(error: BaseException | None) -> tuple[str, int]:
    """State and exit code of a run that ended with `error`."""
    if error is None:
        return "done", 0
    asked = isinstance(error, Interrupted | KeyboardInterrupt)
    return "interrupted" if asked else "failed", exit_status(error)


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        status = json.loads((folder / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
