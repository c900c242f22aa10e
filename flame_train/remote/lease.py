"""The lease of a run: a file in the store that says which machine trains it, written anew four times a minute.

Its age is told by the store's clock alone: from when it was written to when a probe was, just now. So clocks that
disagree change nothing. Where the store writes on a condition, as S3 does, two machines cannot both have it. Elsewhere
it is a sign, and a machine that meets a young one warns.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from flame_train.errors import RemoteError
from flame_train.io.json_values import json_tree, number, table, text, whole

from .faults import Refused, with_retries
from .store import Store

_LOG = logging.getLogger(__name__)

NAME: Final = "lease.json"
SECONDS: Final = 60.0
"""How long a lease is young after it was written."""
_EVERY: Final = 15.0
_LAST: Final = 5.0  # seconds in which it is given back; a store that takes longer has it grow old
_CLOCKS: Final = 300.0  # seconds by which clocks may differ without a word; S3 refuses more than 900
_LARGEST: Final = 1 << 16


class LeaseLost(RemoteError):
    """Another machine has the lease."""


class Lease:
    """The lease of the run at a store. A context manager: within, a thread renews it; afterwards it is given back."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._token = secrets.token_hex(8)
        self._version: str | None = None
        self._conditional = False
        self._ended = threading.Event()
        self._renewed = 0.0
        self._abandoned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.lost: LeaseLost | None = None

    def __enter__(self) -> Lease:
        """Raises Refused where another machine has a young lease, or this user may not write."""
        with_retries(lambda: self._take(self._probe()), lambda: None)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if not self._abandoned:
            giving = threading.Thread(target=self._give_back, name="lease-end", daemon=True)
            giving.start()
            giving.join(_LAST)

    def abandon(self) -> None:
        """Has the end leave the lease to grow old by itself: the store does not answer."""
        self._abandoned = True

    def _give_back(self) -> None:
        with contextlib.suppress(RemoteError), self._lock:
            if self.lost is None:
                self._write(self._content(0.0))

    def check(self) -> None:
        """Raises LeaseLost if another machine has the lease. One that is no longer young is renewed first.

        Where the store writes on no condition, renewing would tell nothing, and fail where there is no room.
        """
        if self._conditional and self.lost is None and time.monotonic() - self._renewed > SECONDS / 2:
            self._renew()
        if self.lost is not None:
            raise self.lost

    def _probe(self) -> datetime:
        """Returns the store's time. Proves the right to write and to remove, and finds out about conditions."""
        name = f".probe-{self._token}"
        self._conditional = self._store.has_conditions(name)
        if not self._conditional:
            self._store.write(name, b"1")
        now = self._store.modified(name) or datetime.now(UTC)
        self._store.remove(name)
        off = (datetime.now(UTC) - now).total_seconds()
        if abs(off) > _CLOCKS:
            _LOG.warning(
                "%s: this machine's clock is %d s %s the store's; set it: S3 refuses requests of more than 900 s",
                self._store,
                abs(off),
                "ahead of" if off > 0 else "behind",
            )
        return now

    def _take(self, now: datetime) -> None:
        holder, self._version = self._read()
        written = self._store.modified(NAME)
        age = SECONDS if written is None else (now - written).total_seconds()
        mine = holder.get("holder") == self._token  # written, but the answer was lost on its way
        if age < (number(holder.get("seconds")) or 0.0) and not mine and not _is_dead(holder):
            self._refuse(holder, max(age, 0.0))
        if not self._write(self._content(SECONDS)):
            self._refuse(self._read()[0], 0.0)
        self._renewed = time.monotonic()

    def _refuse(self, holder: Mapping[str, Any], age: float) -> None:
        """Raises Refused where the store keeps machines apart; elsewhere a warning."""
        who = _who(holder)
        if self._conditional:
            raise Refused(
                f"{self._store}: {who} trains this run, as of {age:.0f} s ago; stop it there and start again, or "
                f"start again {SECONDS:.0f} s after it was taken away"
            )
        _LOG.warning(
            "%s: %s trained this run %.0f s ago, and this store cannot keep two machines apart: "
            "see to it that it runs there no more",
            self._store,
            who,
            age,
        )

    def _keep(self) -> None:
        while not self._ended.wait(_EVERY) and self.lost is None:
            with contextlib.suppress(RemoteError):  # no network: a later one may succeed, or find it lost
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._ended.is_set() or self.lost is not None:
                return
            if not self._write(self._content(SECONDS)):
                holder, version = self._read()
                if holder.get("holder") != self._token:
                    self.lost = LeaseLost(
                        f"{self._store}: {_who(holder)} trains this run now, for this machine's lease was out of date; "
                        f"what it trained since is in {self._folder} alone"
                    )
                    return
                self._version = version  # written, but the answer was lost on its way
            self._renewed = time.monotonic()

    def _read(self) -> tuple[Mapping[str, Any], str | None]:
        """Returns what the lease says, and its version; nothing where there is none."""
        if self._conditional:
            answer = self._store.read_versioned(NAME)
            raw, version = (b"", None) if answer is None else answer
        else:
            raw, version = self._store.read(NAME, _LARGEST) or b"", None
        return table(json_tree(raw)), version

    def _write(self, content: bytes) -> bool:
        """Writes this content. Returns whether the lease is ours."""
        if not self._conditional:
            self._store.write(NAME, content)
            return True
        version = self._store.write_if(NAME, content, self._version)
        self._version = version or self._version
        return version is not None

    def _content(self, seconds: float) -> bytes:
        holder = {
            "holder": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": psutil.Process().create_time(),
            "machine": _machine(),
            "seconds": seconds,
        }
        return json.dumps(holder, indent=1).encode()


def _machine() -> str:
    """Returns a hash of what only processes that see each other's numbers share; empty where the system cannot tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {numbers}".encode()).hexdigest()


def _who(holder: Mapping[str, Any]) -> str:
    """Returns the machine and the process of a lease."""
    return f"{text(holder.get('host'), 'another machine')} (process {whole(holder.get('pid')) or 'unknown'})"


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Tells whether a lease is of a process that ran on this machine and is gone."""
    if not holder.get("machine") or holder["machine"] != _machine():
        return False
    try:
        process = psutil.Process(whole(holder.get("pid")))
        return bool(process.create_time() != holder.get("began") or process.status() == psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True
    except psutil.Error:
        return False
