"""An extension of Griffe: examples in docstrings, which begin with >>>, are code on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts fences around each paragraph that is an example."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with fences around paragraphs that begin with >>>."""
    parts = re.split(r"(\n[ \t]*\n)", text)
    return "".join(f"```pycon\n{part.rstrip()}\n```" if part.lstrip().startswith(">>>") else part for part in parts)
