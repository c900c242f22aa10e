"""A run's process, and the small one that keeps it: starts it once, and writes down how it ended.

`.process.json` in the run folder is locked while the run's process lives. The lock is the kernel's and the process
inherits it, so nobody mistakes a reused number for it. What the file says, with the lock, tells each case apart:

- locked: the run goes on. The number is that of its process, checked by its start time before it gets a signal.
- not locked, with an exit code: it ended so.
- not locked, without one: it was killed, unless its own `status.json` says how it ended.
- of another attempt, or empty: this attempt never began, and may begin.

Who starts a run names the attempt, writes that name down first, and then starts a keeper. A keeper that does not get
the lock, or finds its attempt there, does nothing. So a server may be killed between any two lines and start the
same attempt again: it begins once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import OpenFolder, folder_below
from flame_train.disk.system import lock, lock_soon
from flame_train.errors import OutputError
from flame_train.io.json_values import json_tree, number, table, text, whole
from flame_train.io.run_output import BEGIN, output_of
from flame_train.io.runlog import read_status

PROCESS: Final = ".process.json"
_SIZE: Final = 512  # bytes: written over in place, it needs no room on a disk that has become full
_SAME: Final = 2.0  # seconds: a clock that was set meanwhile moves start times
_POSIX: Final = os.name == "posix"
_OF_ITS_OWN: Final = sum(getattr(subprocess, name, 0) for name in ("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW"))
"""Windows: Ctrl-C in a console reaches no process of another group."""
_DOWNLOADS: Final = {"TQDM_POSITION": "-1", "TQDM_MININTERVAL": "5"}
"""Has huggingface_hub write how far a download is into a file too, now and then."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a run's process: `code` is its exit code, None while it goes on or where it was killed.

    `on` is its device, and `fault` why it could not be started.
    """

    attempt: str = ""
    pid: int = 0
    created: float = 0.0
    code: int | None = None
    alive: bool = False
    on: str = ""
    fault: str = ""


def look(folder: OpenFolder) -> Kept:
    """Returns what is known of the process of the run in a folder."""
    try:
        descriptor = folder.plain_file(PROCESS, os.O_RDONLY)
    except OSError:
        return Kept()
    try:
        alive = _is_locked(descriptor)  # before it is read: what an ended process wrote is all there
        kept = replace(_read(descriptor), alive=alive)
    finally:
        os.close(descriptor)
    if kept.alive or kept.code is not None:
        return replace(kept, alive=kept.code is None)
    with contextlib.suppress(OutputError):
        status = read_status(folder)
        if kept.pid and whole(status.get("pid")) == kept.pid:  # its keeper was killed before it
            return replace(kept, code=whole(status.get("exit_code")))
    return kept


def stop(folder: OpenFolder) -> bool:
    """Sends the process of a run what Ctrl-C sends. Returns whether it could: whether it is known to be that one."""
    kept = look(folder)
    try:
        known = kept.alive and abs(psutil.Process(kept.pid).create_time() - kept.created) < _SAME
    except psutil.Error:
        known = False
    if known and _POSIX:
        os.kill(kept.pid, signal.SIGINT)
    return known and _POSIX


def start(
    root: Path, folder: Path, kept: Kept, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the keeper of an attempt, in a session of its own. Raises OSError where the system refuses a process."""
    words = [sys.executable, "-P", "-m", "flame_train.io.run_process", str(root), str(folder.relative_to(root))]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        [*words, kept.attempt, kept.on, *command],
        env={**os.environ, **environment},
        stdin=null,
        stdout=null,
        stderr=null,
        start_new_session=True,
        creationflags=_OF_ITS_OWN,
    )


def keep(root: Path, folder: Path, attempt: str, on: str, command: Sequence[str]) -> None:
    """Runs the command as the process of the run in a folder below the root, unless this attempt began already.

    Raises OSError where the disk refuses to note it: then nothing was started.
    """
    with ExitStack() as opened:
        above = opened.enter_context(folder_below(root, *folder.parent.parts))
        held = opened.enter_context(above.folder(folder.name))
        descriptor = held.plain_file(PROCESS, os.O_RDWR | os.O_CREAT)
        opened.callback(os.close, descriptor)
        try:
            lock_soon(descriptor)
        except BlockingIOError:
            return
        if _read(descriptor).attempt == attempt:
            return
        kept = Kept(attempt, os.getpid(), psutil.Process().create_time(), on=on)
        _write(descriptor, kept)
        fail_point("process.kept")
        try:
            output = opened.enter_context(above.appending(output_of(folder).name))
            output.write(f"{BEGIN}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            environment, shared = {**_DOWNLOADS, **os.environ}, (descriptor,) if _POSIX else ()
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=environment, stdin=nothing, stdout=output, stderr=output, pass_fds=shared
            )
        except OSError as error:
            _write(descriptor, replace(kept, code=OutputError.exit_code, fault=(error.strerror or str(error))[:100]))
            raise
        kept = replace(kept, pid=process.pid, created=psutil.Process(process.pid).create_time())
        _write(descriptor, kept)
        fail_point("process.started")
        code = process.wait()
        _write(descriptor, replace(kept, code=code if code >= 0 else 128 - code))


def _is_locked(descriptor: int) -> bool:
    try:
        lock(descriptor, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(descriptor: int) -> Kept:
    os.lseek(descriptor, 0, os.SEEK_SET)
    tree = table(json_tree(os.read(descriptor, _SIZE)))
    pid, created = whole(tree.get("pid")), number(tree.get("created"))
    on, fault = text(tree.get("on")), text(tree.get("fault"))
    return Kept(text(tree.get("attempt")), pid or 0, created or 0.0, whole(tree.get("code")), on=on, fault=fault)


def _write(descriptor: int, kept: Kept) -> None:
    raw = json.dumps({name: value for name, value in asdict(kept).items() if name != "alive"}).encode()
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, raw.ljust(_SIZE - 1) + b"\n")
    os.fsync(descriptor)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would the run
    keep(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
