"""A warm parent: forks a process for each command line, so that a test pays for the imports once.

`python warm.py` reads a JSON order a line and answers with a JSON line when that command has ended. What runs is
`flame_train.cli.main` in a process of its own, with its own environment, folder, files for output and limits; it
is killed, if asked for, after so many seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any

import numpy.random  # noqa: F401 - what is forked has it, as the next but one
import PIL.Image
import psutil  # noqa: F401

import flame_train.cli
import flame_train.run.commands.stages
from flame_train.disk import failpoint
from flame_train.text_encoders.clip.encoder import ClipG, ClipL
from flame_train.text_encoders.clip.tokenizer import ClipTokenizer


def serve() -> None:
    # made once, as what is imported above; half a second saved in every run
    PIL.Image.preinit()
    flame_train.cli.command()
    flame_train.models.registry.FAMILIES["sdxl"].lora_names_in({})
    for padding in (ClipL.pad, ClipG.pad):
        ClipTokenizer(padding).encode(ClipTokenizer(padding).fingerprint)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        order = json.loads(line)
        if "AWS_ENDPOINT_URL_S3" in order["env"]:  # a command that has a store has its library
            import s3fs  # noqa: F401
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(order)
        status = _wait(pid, order["kill_after"])
        answer = {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin}
        print(json.dumps(answer), flush=True)  # noqa: T201


def _wait(pid: int, kill_after: float | None) -> int:
    if kill_after is not None and signal.sigtimedwait({signal.SIGCHLD}, kill_after) is None:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _become(order: dict[str, Any]) -> None:
    """The child: never returns."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it,
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this
        os.chdir(order["cwd"])
        os.environ.update(order["env"])
        for number, path in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        for name, limit in order["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        failpoint.arm(order["failpoint"])
        sys.argv = ["flame-train", *order["arguments"]]
        flame_train.cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
