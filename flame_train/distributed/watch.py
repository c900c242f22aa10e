"""How processes that train together end together: each leaves a sign of life in the run folder, and reads the others'.

A launcher ends all processes when one exits. A process that was stopped, or whose machine is gone, exits nowhere; and
the others wait for it in a sum for ever. So each writes a file every few seconds, and ends where another's is old, or
says that its process failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flame_train.errors import DeviceFault, OutputError, exit_status, lines_shown

from .group import ProcessGroup

FOLDER: Final = ".ranks"
_EVERY = 2.0  # seconds between two signs of life
_SILENT = 40.0  # seconds without one after which a process counts as gone
_GRACE = 3.0  # seconds that a launcher has to end a process by itself


class Watch:
    """Signs of life of the processes of `group` in the run folder. A process by itself leaves none."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self._group, self._folder = group, folder / FOLDER
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flame-train-watch", daemon=True)
        self._told = False
        self._beats = 0

    def __enter__(self) -> Self:
        if self._group.world > 1:
            with self._group.barrier():
                if self._group.leads:
                    self._folder.mkdir(exist_ok=True)
                    for old in self._folder.glob("*.json"):
                        old.unlink(missing_ok=True)
                    self._write({})
            self._refuse_elsewhere()
            self._write({})
            self._thread.start()
        return self

    def _refuse_elsewhere(self) -> None:
        """Raises OutputError, in all processes, if one has another folder there than the leading one."""
        own = f"{socket.gethostname()}, process {os.getpid()}"
        leading, sign = self._group.all_gather(own)[0], self._read(0)
        with self._group.barrier():
            if sign is None or f"{sign['host']}, process {sign['pid']}" != leading:
                raise OutputError(
                    f"{self._folder.parent}: rank {self._group.rank} does not see what rank 0 writes there; "
                    "give all processes the same output.dir, on a disk that their machines share"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        if self._told:  # the file stays until the next start: the others have yet to read it
            return
        with contextlib.suppress(OSError):
            self._file(self._group.rank).unlink(missing_ok=True)
            self._folder.rmdir()  # by the last of them

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within, an error that ends this process alone reaches the others, which would wait for it."""
        try:
            yield
        except Exception as error:
            if not self._group.is_shared(error):
                self._ended.set()
                self._thread.join()
                self._write({"code": exit_status(error), "message": str(error) or type(error).__name__})
                self._told = True
            raise

    def _run(self) -> None:
        others = [rank for rank in range(self._group.world) if rank != self._group.rank]
        seen: dict[int, tuple[object, float]] = dict.fromkeys(others, (None, time.monotonic()))
        while not self._ended.wait(_EVERY):
            self._write({})
            for rank, (before, since) in list(seen.items()):
                sign, state = self._seen(rank)
                if sign is not None and "code" in sign:
                    time.sleep(_GRACE)
                    self._end(int(sign["code"]), f"rank {rank} failed: {sign['message']}")
                now = time.monotonic()
                if state != before:
                    seen[rank] = state, now
                elif now - since > _SILENT:
                    where = f" ({sign['host']}, process {sign['pid']})" if sign else ""
                    self._end(
                        DeviceFault.exit_code, f"rank {rank}{where} has given no sign of life for {_SILENT:.0f} s"
                    )

    def _end(self, code: int, message: str) -> None:
        if self._ended.is_set():
            return
        print(  # noqa: T201  # the main thread waits for a sum that does not come
            lines_shown(
                f"error: rank {self._group.rank}: {message}; the last checkpoint is whole: start again to go on"
            ),
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    def _write(self, more: dict[str, Any]) -> None:
        self._beats += 1
        sign = {"pid": os.getpid(), "host": socket.gethostname(), "beat": self._beats, **more}
        file = self._file(self._group.rank)
        part = file.with_suffix(".part")
        try:
            part.write_text(json.dumps(sign))
            part.replace(file)
        except OSError:
            with contextlib.suppress(OSError):  # a folder that was moved: the others decide
                os.utime(file)  # a full disk has room for this

    def _read(self, rank: int) -> dict[str, Any] | None:
        return self._seen(rank)[0]

    def _seen(self, rank: int) -> tuple[dict[str, Any] | None, object]:
        """What a process wrote, and something that is another with each of its signs of life.

        A network disk asks its server when a file is opened. What it knows of a file that is not opened, such as the
        time of its last change, may be a minute old.
        """
        try:
            with self._file(rank).open() as file:
                text, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None, None
        try:
            sign = json.loads(text)
        except ValueError:
            return None, (text, changed)
        return sign if isinstance(sign, dict) else None, (text, changed)

    def _file(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"


@contextmanager
def ending_together(group: ProcessGroup) -> Iterator[None]:
    """A process that fails by itself says so and ends all. The others would wait for it, and it for them at its end.

    Where all fail, each waits until the others have closed what they had open: a launcher ends all when one exits.
    """
    try:
        yield
    except Exception as error:
        if not group.is_shared(error):
            print(lines_shown(f"error: rank {group.rank}: {error}"), file=sys.stderr, flush=True)  # noqa: T201
            assert group.collectives is not None
            group.collectives.abort(exit_status(error))
        group.all_gather("ended")
        raise
