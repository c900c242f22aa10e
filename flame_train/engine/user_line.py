"""The line of the code that uses the engine."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

_ENGINE = str(Path(__file__).parent)


def user_line() -> str:
    """The innermost line outside the engine that led here, as "file.py:12: y = x.log()"; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_ENGINE):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{place}: {text}" if text else place
