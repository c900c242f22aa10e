"""Servers of stores on this machine: moto's S3, OpenSSH's SFTP, one of SFTP on a small disk, one that says no, and a
proxy that spoils a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
"""OpenSSH's server, where it is installed."""


@dataclass(frozen=True)
class Sftp:
    """A server of SFTP for this user. `home` has the key, the known host and the settings that ssh reads."""

    port: int
    home: Path

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home)}

    def address(self, folder: Path) -> str:
        return f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{folder}"


def _keys(folder: Path, port: int) -> Path:
    """Makes the keys of a server and of its user. Returns the user's home."""
    import asyncssh

    home = folder / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for path in (folder / "host", home / ".ssh" / "id_ed25519"):
        made = asyncssh.generate_private_key("ssh-ed25519")
        made.write_private_key(path)
        path.chmod(0o600)
        made.write_public_key(f"{path}.pub")
    public = (folder / "host.pub").read_text().split()[:2]
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(public)}\n")
    return home


@contextmanager
def sshd(folder: Path) -> Iterator[Sftp]:
    """OpenSSH's server while the block runs, its keys in `folder`."""
    assert SSHD is not None
    port = free_port()
    home = _keys(folder, port)
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": home / ".ssh" / "id_ed25519.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        wait_for(port, process)
        yield Sftp(port, home)
    finally:
        process.terminate()
        process.wait()


class Disk:
    """What is below a folder, files that are open and removed too, may take `room` bytes."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room = folder, room
        self.opened = list[Any]()

    def left(self) -> int:
        """Bytes that may still be written."""
        self.opened = [file for file in self.opened if not file.closed]
        found = [os.fstat(file.fileno()) for file in self.opened]
        found += [path.stat() for path in self.folder.rglob("*") if path.is_file()]
        return self.room - sum({each.st_ino: each.st_size for each in found}.values())


@contextmanager
def small_sftp(folder: Path, disk: Disk) -> Iterator[Sftp]:
    """asyncssh's server while the block runs. Where its disk is full it answers as OpenSSH's does, without a reason."""
    import asyncssh

    class Server(asyncssh.SFTPServer):
        def open(self, path: bytes, pflags: int, attrs: Any) -> Any:
            made: Any = super().open(path, pflags, attrs)
            disk.opened.append(made)
            return made

        def write(self, file_obj: Any, offset: int, data: bytes) -> Any:
            if len(data) > disk.left():
                raise asyncssh.SFTPFailure("Failure")
            return super().write(file_obj, offset, data)

        def statvfs(self, path: bytes) -> Any:
            os.stat(path)
            left = max(0, disk.left())
            return asyncssh.SFTPVFSAttrs(bsize=1, frsize=1, blocks=disk.room, bfree=left, bavail=left)

    port = free_port()
    home = _keys(folder, port)
    keys = {"server_host_keys": [str(folder / "host")], "authorized_client_keys": str(home / ".ssh/id_ed25519.pub")}
    loop, ended, listening = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        connections = list[Any]()
        keep = {"acceptor": connections.append}
        async with asyncssh.listen("127.0.0.1", port, sftp_factory=Server, **keep, **keys):
            listening.set()
            await ended.wait()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    listening.wait()
    try:
        yield Sftp(port, home)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@contextmanager
def refusing(code: str, status: int = 403) -> Iterator[S3]:
    """A server that answers every request of S3 with one error, whose message repeats the key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which answers a client that asks before it sends

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = f"<Error><Code>{code}</Code><Message>said of {KEY}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
        setattr(Handler, f"do_{method}", Handler.answer)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3(server.server_port)
    finally:
        server.shutdown()
        server.server_close()


class Proxy:
    """Passes connections on to a port, and spoils them as its attributes say, from now on.

    Attributes:
        drops: every connection is closed before a byte passes.
        delay: seconds before each piece passes.
        cuts: so many pieces of more than a kilobyte are cut off in the middle, and their connections with them.
        corrupts: so many such pieces have a bit flipped near their end.
        spoils: whose pieces these are: "sent" to the server, or "got" from it.
        passed: pieces that passed as they were.
    """

    def __init__(self, target: int) -> None:
        self.drops, self.delay, self.cuts, self.corrupts, self.spoils, self.passed = False, 0.0, 0, 0, "sent", 0
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.drops:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((client, server, "sent"), (server, client, "got")):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if self.drops:
                    break
                if self.delay:
                    time.sleep(self.delay)
                spoilt = way == self.spoils and len(piece) > 1024
                if spoilt and self.cuts:
                    self.cuts -= 1
                    sink.sendall(piece[: len(piece) // 2])
                    break
                if spoilt and self.corrupts:
                    self.corrupts -= 1
                    piece = piece[:-200] + bytes([piece[-200] ^ 1]) + piece[-199:]
                else:
                    self.passed += 1
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """A proxy before a port of this machine."""
    made = Proxy(target)
    try:
        yield made
    finally:
        made.close()
