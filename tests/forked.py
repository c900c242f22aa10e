"""A Python that has imported the program: commands forked from it need no two seconds of imports each.

`python forked.py SOCKET` serves. `python forked.py SOCKET -m flame_train ARGUMENT...`, and `-c CODE ARGUMENT...`, stand
for a process forked there. It has their environment, folder and standard files, gets their signals, and dies with them.
What is read at import is the server's: threads of BLAS, the seed of hashes. Who stops one by SIGSTOP, or asks for its
number, begins a Python of his own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stand_for(path: str, arguments: list[str]) -> int:
    """The caller's process: ends as the forked one does."""
    ignored = [int(number) for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    order = {"arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "ignored": ignored}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
        pid = int(server.recv(32))

        def pass_on(number: int, _: Any) -> None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int(server.recv(32))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(path: str) -> None:
    """Forks a keeper for each caller, until the tests' process ends: its end of standard input closes then."""
    _import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)  # noqa: T201
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            caller, _ = listener.accept()
            text, files, _, _ = socket.recv_fds(caller, 1 << 20, 3)
            if text and b"AWS_ENDPOINT_URL_S3" in text:  # a command that has a store has its library
                import s3fs  # noqa: F401
            if text and os.fork() == 0:
                listener.close()
                _keep(caller, json.loads(text), files)
            for file in (*files, caller.detach()):
                os.close(file)


def _import() -> None:
    """Loads what is forked then, and makes what every run would make once: half a second of each."""
    import numpy.random  # noqa: F401
    import PIL.Image
    import psutil  # noqa: F401

    import flame_train.cli
    import flame_train.run.commands.stages
    from flame_train.text_encoders.clip.encoder import ClipG, ClipL
    from flame_train.text_encoders.clip.tokenizer import ClipTokenizer

    PIL.Image.preinit()
    flame_train.cli.command()
    flame_train.models.registry.FAMILIES["sdxl"].lora_names_in({})
    for padding in (ClipL.pad, ClipG.pad):
        ClipTokenizer(padding).encode(ClipTokenizer(padding).fingerprint)


def _keep(caller: socket.socket, order: dict[str, Any], files: list[int]) -> None:
    """Has a child do what was asked for, and says how it ended; kills it when the caller is gone.

    It holds the files until then: who reads a killed caller's output to its end has waited for the child.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        caller.close()
        _become(order, files)
    ended = os.pidfd_open(pid)
    with suppress(BrokenPipeError):
        caller.send(str(pid).encode())
    if ended not in select.select([caller, ended], [], [])[0]:  # nothing comes from a caller but its end
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        caller.send(str(code).encode())
    os._exit(0)


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """The child: ends as a Python does."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in order["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    how, what, *arguments = order["arguments"]
    import flame_train.cli

    sys.argv = ["-c" if how == "-c" else "flame-train", *arguments]
    if how == "-c":
        exec(what, {"__name__": "__main__"})
    else:
        flame_train.cli.main()
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(stand_for(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
