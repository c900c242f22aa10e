"""Names of files that look alike: a Mac writes an accented letter as two code points, other systems as one."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable


def matcher(names: Iterable[str]) -> Callable[[str], str]:
    """A function: a name -> the one of `names` that it equals, or looks like (Unicode's form C); else itself."""
    exact = frozenset(names)
    forms = {_form(name): name for name in exact if not name.isascii()}

    def same(name: str) -> str:
        return name if name in exact or name.isascii() else forms.get(_form(name), name)

    return same


def alike(name: str) -> str:
    """What names have in common that differ in case, spaces at an end or forms of letters alone."""
    return unicodedata.normalize("NFKC", name).casefold().strip()


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", name)
