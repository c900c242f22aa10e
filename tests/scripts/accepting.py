"""`scripts/accept.py` in one process, so that a test does not start ten."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flame_train import cli

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = ["--device", "cpu", "--precision", "fp32", "--size", "64", "--steps", "2", "--sample-steps", "2"]


def accept(patch: pytest.MonkeyPatch, checkpoint: Path, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    patch.syspath_prepend(str(SCRIPTS))
    script, theirs = (importlib.import_module(name) for name in ("accept", "accept_diffusers"))

    def command(argv: list[str]) -> str:
        said, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            if argv[1].endswith("accept_diffusers.py"):
                theirs.main(argv[2:])
            elif cli.run(argv[3:]):
                raise script.Failed(told.getvalue())
        return said.getvalue()

    patch.setattr(script, "command", command)
    patch.setattr(script, "machine", lambda device: {})
    code = script.main([str(checkpoint), "--out", str(out), *SMALL, *more])
    return code, json.loads((out / "report.json").read_text())
