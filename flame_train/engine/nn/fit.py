"""Whether the tensors of a file or a dict fit a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ModelFileError


def check_shapes(declared: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises `ModelFileError` listing every missing, unexpected and mis-shaped tensor of the component `what`."""
    missing = [n for n in declared if n not in found]
    unexpected = [n for n in found if n not in declared]
    wrong = [n for n in declared if n in found and tuple(found[n]) != declared[n]]
    if not (missing or unexpected or wrong):
        return
    lines = [f"{what}: the weights do not fit the model"]
    lines += _listed("missing", missing, lambda n: f"{n}{_near(n, unexpected)}")
    lines += _listed("unexpected", unexpected, lambda n: n)
    lines += _listed("mis-shaped", wrong, lambda n: f"{n}: expected {declared[n]}, found {tuple(found[n])}")
    raise ModelFileError("\n".join(lines))


def _near(name: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # only when something is wrong: it takes as long to import as a layer

    match = get_close_matches(name, names[:2000], n=1, cutoff=0.85)
    return f" (the file has {match[0]})" if match else ""


def _listed(title: str, names: Sequence[str], show: Any) -> list[str]:
    if not names:
        return []
    rest = [f"    ... and {len(names) - 5} more"] if len(names) > 5 else []
    return [f"  {title}: {len(names)}", *(f"    {show(n)}" for n in names[:5]), *rest]
