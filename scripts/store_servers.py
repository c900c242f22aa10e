"""Servers of stores on this machine: moto's S3. Each is a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

KEY, SECRET = "AKIAPLANTEDKEY000000", "planted/SECRET/0123456789abcdefghijklmnop"
"""Credentials that must be found in no file and no message."""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 30.0) -> None:
    """Returns when somebody listens on the port. Raises TimeoutError."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


@dataclass(frozen=True)
class S3:
    """moto's S3 server with one bucket, `runs`."""

    port: int
    log: str = field(default="", repr=False)

    def environment(self, port: int | None = None) -> dict[str, str]:
        """By which AWS's own libraries find it; `port` of a proxy before it."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        with urllib.request.urlopen(request) as answer:
            answer.read()


@contextmanager
def moto() -> Iterator[S3]:
    """moto's server while the block runs."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        made = S3(port)
        made.make_bucket("runs")
        yield made
    finally:
        process.kill()
        process.wait()
