"""Whether a run may be continued with another configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flame_train.config.keys import Key, keys
from flame_train.config.render import decisive, toml_value
from flame_train.config.schema import Config
from flame_train.schedules import SCHEDULES


def differences(old: str, new: Config, *, moved: bool = False, shared_out: bool = False) -> str | None:
    """A table of the settings that differ between `old`, a resolved config as text, and `new`. It has those on which
    the trained weights depend; None means that the run may continue.

    `train.steps` may change under a schedule that does not depend on it, nor its warm-up: the steps already taken are
    then the same.
    Files and folders may be written in another way. Files may lie elsewhere if `moved` says that their contents are
    compared. `shared_out` says that an update takes as many micro-batches as before, of another number of processes.
    """
    before, now = _settings(old), decisive(new)
    if before is None:
        return "  its config.toml cannot be read"
    same_shape = before.get("schedule.name") == now["schedule.name"]
    constant = same_shape and SCHEDULES.chosen(new.schedule).same_prefix and not new.schedule.warmup
    rows = []
    for path, value in now.items():
        key = keys()[path]
        if path not in before and any(before.get(choice) != now[choice] for choice in key.only):
            continue  # it came with a choice that is listed
        was = before.get(path, key.default_among(now))
        if (constant and path == "train.steps") or (shared_out and path == "gradient.accumulation"):
            continue
        if not _same(key, was, value, moved):
            rows.append((path, toml_value(was), toml_value(value)))
    if not rows:
        return None
    rows.insert(0, ("setting", "that run", "this config"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {path:<{widths[0]}}  {was:<{widths[1]}}  {wanted}" for path, was, wanted in rows)


def _same(key: Key, was: Any, value: Any, moved: bool) -> bool:
    if key.place and isinstance(was, str) and was and value:
        return moved or ("\0" not in was and Path(was).resolve() == Path(value).resolve())
    if key.is_tables:
        was, value = (key.with_places(given, lambda path: "" if moved else _resolved(path)) for given in (was, value))
        return toml_value(was) == toml_value(value)
    return bool(was == value)


def _resolved(path: str) -> str:
    return path if "\0" in path else str(Path(path).resolve())


def _settings(text: str) -> dict[str, Any] | None:
    """Values by path, or None if `text` is not TOML."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError):
        return None
    return {
        f"{section}.{name}": tuple(value) if isinstance(value, list) else value
        for section, table in tree.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }
