"""Whether a run may be continued with another configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from flame_train.config.keys import Key, keys
from flame_train.config.render import decisive, toml_value
from flame_train.config.schema import Config
from flame_train.io.json_values import toml_tree, whole
from flame_train.schedules import SCHEDULES

_FREE_OF_STATE: Final = frozenset(
    f"lora.{name}"
    for name in ("targets", "dropout", "rank_dropout", "module_dropout", "max_norm", "from", "from_resize")
)
"""What may differ where an optimizer's state is carried over; the layers themselves are compared by name."""


def differences(old: str, new: Config, *, moved: bool = False, shared_out: bool = False) -> str | None:
    """Returns a table of the settings that differ between `old`, a resolved config as text, and `new`.

    It has those on which
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
    rows = list[tuple[str, str, str]]()
    for path, value in now.items():
        key = keys()[path]
        if path not in before and any(before.get(choice) != now[choice] for choice in key.only):
            continue  # it came with a choice that is listed
        was = before.get(path, key.default_among(now))
        if (constant and path == "train.steps") or (shared_out and path == "gradient.accumulation"):
            continue
        if not _same(key, was, value, moved):
            rows.append((path, toml_value(was), toml_value(value)))
    return table(rows, "that run") + _of_length(before, new) if rows else None


def _of_length(before: Mapping[str, Any], new: Config) -> str:
    """Says what another number of steps changes: a line, where it changes anything."""
    was, steps, schedule = whole(before.get("train.steps")), new.train.steps, new.schedule
    if was is None or was == steps:
        return ""
    if schedule.warmup:
        rise, now = schedule.warmup_of(was), schedule.warmup_of(steps)
        return f"\n  the warm-up is a share of train.steps: of {steps} it takes {now} steps, and took {rise}"
    if not SCHEDULES.chosen(schedule).same_prefix:
        name = SCHEDULES.chosen(schedule).name
        return (
            f"\n  the {name} schedule goes by train.steps: of {steps} each step so far would have had another learning "
            'rate; schedule.name = "constant" from the start would let a run be prolonged'
        )
    return ""


def incompatible_settings(old: str, new: Config) -> str | None:
    """Returns a table of the settings for which an optimizer's state of `old`, a resolved config, fits no run of `new`.

    They are the optimizer's name, and what the adapters' matrices and scales depend on but for the choice of layers.
    """
    before, now = _settings(old), decisive(new)
    if before is None:
        return "  its config.toml cannot be read"
    rows = []
    for path, value in now.items():
        if path == "optimizer.name" or (path.startswith("lora.") and path not in _FREE_OF_STATE):
            key = keys()[path]
            was = before.get(path, key.default_among(now))
            if key.is_tables:
                was, value = _sizes(was), _sizes(value)
            if toml_value(was) != toml_value(value):
                rows.append((path, toml_value(was), toml_value(value)))
    return table(rows, "that run") if rows else None


def _sizes(rules: Any) -> tuple[dict[str, Any], ...]:
    """Says what rules say of the sizes of matrices: not of rates or dropout."""
    listed = rules if isinstance(rules, tuple) else (rules,)
    given = [rule.model_dump(exclude_unset=True) if isinstance(rule, BaseModel) else rule for rule in listed]
    tables = [rule if isinstance(rule, dict) else {"": rule} for rule in given]
    return tuple({k: v for k, v in rule.items() if k not in ("lr", "dropout")} for rule in tables)


def table(rows: Sequence[tuple[str, str, str]], there: str) -> str:
    """Settings with their values `there` and in this config, as text in columns."""
    rows = [("setting", there, "this config"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {path:<{widths[0]}}  {was:<{widths[1]}}  {wanted}" for path, was, wanted in rows)


def _same(key: Key, was: Any, value: Any, moved: bool) -> bool:
    if key.place or key.is_tables:
        was, value = (
            key.with_places(given, lambda path: "there" if moved else _resolved(path)) for given in (was, value)
        )
        return toml_value(was) == toml_value(value)
    return bool(was == value)


def _resolved(path: str) -> str:
    return path if "\0" in path else os.path.realpath(path)


def _settings(text: str) -> dict[str, Any] | None:
    """Returns values by path, or None if `text` is not TOML."""
    try:
        tree = toml_tree(text)
    except ValueError:
        return None
    return {
        f"{section}.{name}": tuple(value) if isinstance(value, list) else value
        for section, table in tree.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }
