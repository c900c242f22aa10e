"""Choices that a user's script adds to the tables of a config, and what a run records of them.

A registered class stands in the same table as the package's own. What a run used is in each checkpoint: the kind, the
name, the keys, the script's name, and the SHA-256 of the file that has the class.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from pydantic import ValidationError

from flame_train.adapters.kinds import ADAPTERS, AdapterKind
from flame_train.config.keys import key_of, keys
from flame_train.config.schema import Config
from flame_train.diffusion.losses import LOSSES, LossKind
from flame_train.diffusion.noise import NOISE_KINDS, NoiseKind
from flame_train.diffusion.objective_kind import OBJECTIVES, ObjectiveKind
from flame_train.diffusion.samplers import SAMPLERS, Sampler
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS, TimestepSampling
from flame_train.diffusion.weightings import WEIGHTINGS, Weighting
from flame_train.errors import kind_of
from flame_train.io.json_values import json_tree, rows, table, text
from flame_train.optimizers import OPTIMIZERS, OptimizerKind
from flame_train.schedules import SCHEDULES, ScheduleKind
from flame_train.settings import Entry, Script, Table, entries_of

KINDS: Final[Mapping[str, tuple[Table[Any], type[Entry]]]] = {
    "optimizer": (OPTIMIZERS, OptimizerKind),
    "loss": (LOSSES, LossKind),
    "weighting": (WEIGHTINGS, Weighting),
    "timestep_sampling": (TIMESTEP_SAMPLINGS, TimestepSampling),
    "noise": (NOISE_KINDS, NoiseKind),
    "schedule": (SCHEDULES, ScheduleKind),
    "adapter": (ADAPTERS, AdapterKind),
    "sampler": (SAMPLERS, Sampler),
    "objective": (OBJECTIVES, ObjectiveKind),
}
"""What may be registered: its table, and the class that an entry derives from."""


def register(kind: str, entry: Any) -> None:
    """Puts a user's class into the table of its kind, and its keys into the config.

    Raises TypeError for what is no such class or has a wrong key, ValueError for a name or key that is taken.
    """
    where = f"flame_train.register: {kind}"
    entries, base = KINDS[kind]
    _check_class(where, entry, base)
    before = entries.get(entry.name)
    if before is not None and not _is_same(before, entry):
        owner = "flame-train has" if before.script is None else f"{before.script.name} registered"
        raise ValueError(f'{where}: the name "{entry.name}" is taken, {owner} one; choose another')
    _check_keys(f'{where} "{entry.name}"', entry, entries)
    entry.script = _script_of(entry, where)
    entries.add(entry)
    for section in entries.sections:
        name = next(name for name, info in Config.model_fields.items() if info.annotation is section)
        Config.model_fields[name].default = section()
    Config.model_rebuild(force=True)
    keys.cache_clear()


def _check_class(where: str, entry: Any, base: type[Entry]) -> None:
    expected = f"expected a class derived from {base.__module__}.{base.__name__}"
    if not isinstance(entry, type):
        raise TypeError(f"{where}: {expected}, got {'an instance of ' * isinstance(entry, Entry)}{kind_of(entry)}")
    if not issubclass(entry, base):
        raise TypeError(f"{where}: {expected}, got {entry.__name__}")
    name = vars(entry).get("name")
    if not isinstance(name, str) or not name.isidentifier():
        got = "none" if name is None else repr(name)
        raise TypeError(f'{where}: expected {entry.__name__}.name, an identifier such as "mine", got {got}')
    if lacking := sorted(getattr(entry, "__abstractmethods__", ())):
        raise TypeError(f"{where}: {entry.__name__} lacks {', '.join(lacking)} of {base.__name__}")
    _check_methods(where, entry, base)


def _check_methods(where: str, entry: type[Entry], base: type[Entry]) -> None:
    """Raises TypeError for a method that cannot be called as that of `base`."""
    for name, own in inspect.getmembers(entry, inspect.isfunction):
        theirs = getattr(base, name, None)
        if name.startswith("_") or not isinstance(theirs, FunctionType) or own is theirs:
            continue
        expected = list(inspect.signature(theirs).parameters)
        try:
            inspect.signature(own).bind(*expected)
        except TypeError:
            raise TypeError(
                f"{where}: expected {entry.__name__}.{name}({', '.join(expected)}), got {inspect.signature(own)}"
            ) from None


def _check_keys(where: str, entry: type[Entry], entries: Table[Any]) -> None:
    """Raises TypeError for a key that no config could have, ValueError for one that something else has."""
    section = entries.sections[0]
    tables: tuple[Table[Any], ...] = section.tables  # type: ignore[attr-defined]
    others = {name for other in tables if other is not entries for name in other.fields()}
    taken = others.union(section.__base__.model_fields, [entries.key]) - {""}  # type: ignore[union-attr]
    same = {name: info for one in entries.values() if one.name != entry.name for name, info in one.model_fields.items()}
    for name, info in entry.model_fields.items():
        if not isinstance(info.json_schema_extra, dict) or "instead_of" not in info.json_schema_extra:
            raise TypeError(f"{where}: expected {name} to be declared by flame_train.settings.field(default, doc)")
        try:
            key_of("", name, info)
        except (AssertionError, KeyError, TypeError, IndexError):
            raise TypeError(
                f"{where}: expected {name} to be a bool, int, float, str, Literal, or a tuple of these, got "
                f"{info.annotation}"
            ) from None
        there = same.get(name)
        if name in taken or (there and (there.annotation, there.metadata) != (info.annotation, info.metadata)):
            raise ValueError(f"{where}: the key {name} is taken: its section has one of another meaning; rename it")
    try:
        entry(**{name: info.default for name, info in entry.model_fields.items()})
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        raise TypeError(f"{where}: the default of {name} does not fit: {wrong['msg'].lower()}") from None


def _is_same(one: type[Entry], other: type[Entry]) -> bool:
    """Tells whether two classes have one place in the code, as where a cell of a notebook ran twice."""
    return one.script is not None and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _script_of(entry: type[Entry], where: str) -> Script:
    """Returns the script that runs, and the digest of the file with the class; in a notebook of its methods.

    Raises TypeError for a class whose code lies nowhere.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        file = inspect.getsourcefile(entry)
        code = b"" if file is None else Path(file).read_bytes()
    except (OSError, TypeError):
        file, code = None, b""
    try:
        code = code or "\n".join([entry.__qualname__, *map(inspect.getsource, _methods(entry))]).encode()
    except (OSError, TypeError):
        code = b""
    if not code:
        raise TypeError(f"{where}: expected {entry.__name__} in a file or a cell of a notebook, so that a run knows it")
    name = Path(script).name if script else "a notebook"
    return Script(name, Path(file).name if file else name, hashlib.sha256(code).hexdigest())


def _methods(entry: type[Entry]) -> Iterator[Any]:
    for member in vars(entry).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            yield function


def used_code(config: Config) -> tuple[dict[str, Any], ...]:
    """Returns the record of each registered entry that a config uses, in the order of `KINDS`."""
    sections = [getattr(config, name) for name in Config.model_fields]
    used = [type(one) for section in sections for one in entries_of(section) if getattr(one, "on", True)]
    return tuple(_record(kind, entry) for kind, (_, base) in KINDS.items() for entry in used if _is_own(entry, base))


def _is_own(entry: type[Entry], base: type[Entry]) -> bool:
    return entry.script is not None and issubclass(entry, base)


def _record(kind: str, entry: type[Entry]) -> dict[str, Any]:
    assert entry.script is not None
    entries, script = KINDS[kind][0], entry.script
    section = next(name for name, info in Config.model_fields.items() if info.annotation is entries.sections[0])
    own = [name for name in (entries.key, *entry.model_fields) if name]
    return {
        "kind": kind,
        "name": entry.name,
        "keys": [f"{section}.{name}" for name in own],
        "script": script.name,
        "file": script.file,
        "sha256": script.sha256,
    }


def unregistered(run: Path) -> dict[str, str]:
    """Returns what a run uses and no script has registered here, by each of its keys: a sentence that says so."""
    said: dict[str, str] = {}
    for record in _recorded(run):
        entries, _ = KINDS.get(text(record.get("kind")), (None, None))
        name, script = text(record.get("name")), text(record.get("script"))
        if entries is not None and name not in entries:
            what = f'the {record["kind"]} "{name}" of {script}'
            said |= dict.fromkeys(map(text, _list(record.get("keys"))), f"{run} uses {what}: run that script")
    return said


def _recorded(run: Path) -> list[Mapping[str, Any]]:
    """Returns the records in the newest checkpoint of a run; none where there is no such file."""
    files = sorted((run / "checkpoints").glob("step-*/state.json"))
    try:
        return rows(table(json_tree(files[-1].read_bytes())).get("code")) if files else []
    except (OSError, ValueError):
        return []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
