"""A config that is being written: its text checked, changed, planned and kept, by what the commands use for that.

Nothing is kept between two requests. The text comes from the page, and what follows from it goes back.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from flame_train.config.foreign.recognize import program_of
from flame_train.config.keys import Key, keys, sections
from flame_train.config.load import Problem, checked, typed
from flame_train.config.located import ConfigWithSource, with_key_names
from flame_train.config.parse import parse
from flame_train.config.read import text_layer
from flame_train.config.render import flat, toml_value
from flame_train.config.schema import Config
from flame_train.config.toml_edit import with_value
from flame_train.data.sets import DataSet, image_sets
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import free_bytes, refuse_place
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError, FlameError, Interrupted, shown
from flame_train.families import licences
from flame_train.io.addresses import is_address, is_hub_name
from flame_train.io.hub import Fetch
from flame_train.models.registry import FAMILIES
from flame_train.run.commands.describe import as_text, verdict
from flame_train.run.commands.stages import dry_run_of
from flame_train.tools import init
from flame_train.tools.import_config import import_config
from flame_train.training.session import Session, StopRequest

from .queue_file import QUEUE
from .words import in_the_window

NAME: Final = "config"
"""What the text is called in messages, which stand beside it."""

_GIB: Final = 1 << 30
_LINE: Final = re.compile(rf"{NAME}(?::(\d+))?(?::\d+)?: (?:([a-z_]+(?:\.[a-z0-9_]+)?)(?: \d+)?: )?(.*)")
_HEAD: Final = re.compile(r"; |: |, |(?<!/) \(")
_BARE: Final = re.compile(r"([a-z_]+\.[a-z0-9_]+): (.*)")


# ---- the schema as a form


def form() -> dict[str, Any]:
    """Returns every key with what a field of a form needs, in the order of the file, and those that come first."""
    common = dict.fromkeys(init.MUST)
    for family in init.recipes():
        for name in init.names(family):
            preset = init.preset(family, name, None)
            common |= dict.fromkeys((*preset.must, *preset.values))
        common |= dict.fromkeys(path for row in init.cards(family) for path in row["keys"])
    return {
        "sections": {name: Config.model_fields[name].description for name in sections()},
        "common": [path for path in keys() if path in common],
        "keys": [_field(key) for key in keys().values()],
    }


def _field(key: Key) -> dict[str, Any]:
    """Returns what a field needs; what heads it is how the key's meaning begins."""
    title = _HEAD.split(key.doc, 1)[0]
    return {
        "path": key.path,
        "section": key.section,
        "name": key.name,
        "title": title[:1].upper() + title[1:],
        "doc": key.doc[len(title) :].lstrip(";:, "),
        "unit": key.unit,
        "expected": key.expected,
        "kind": _kind(key),
        "choices": [str(choice) for choice in key.choices],
        "default": toml_value(key.default),
        "defaults": {name: toml_value(value) for name, value in key.defaults.items()},
        "chosen_by": key.chosen_by,
        "only": {path: list(names) for path, names in key.only.items()},
        "aka": list(key.aka),
        "place": key.place,
        "free": key.free,
    }


def _kind(key: Key) -> str:
    """Returns the kind of field: "switch", "choice", "text", "number", "lines", or "toml" for whatever else is."""
    kinds = {bool: "switch", str: "text", int: "number", float: "number"}
    if key.has_short_form or key.annotation == tuple[str, ...]:
        return "lines"
    plain = bool(key.choices) and key.expected.startswith(("one of", '"')) and " or " not in key.expected
    return "choice" if plain else kinds.get(key.annotation, "toml")


# ---- the text


def look(text: str, roots: Roots) -> tuple[ConfigWithSource, list[Problem]]:
    """Returns the settings of a text and everything that its schema and the roots refuse. Raises ConfigError."""
    located, problems = checked(text_layer(text, NAME))
    assert located.layered is not None
    known, places = {problem.key for problem in problems}, located.layered.places
    for path, value in _places(located.config):
        section, name = path.split(".")
        try:
            if path not in known and not is_hub_name(value) and not is_address(value):
                roots.refuse_links_out(roots.place(value))
        except ConfigError as error:
            problems.append(Problem(places.get((section, name), NAME), path, str(error)))
    return located, problems


def _places(config: Config) -> Iterator[tuple[str, str]]:
    """Yields every file and folder that a config names, with its key."""
    for path, key in keys().items():
        value = getattr(getattr(config, key.section), key.name)
        tables = value if key.is_tables else ()
        values = [value] if key.place else [getattr(table, name) for table in tables for name in key.table_places]
        for each in values:
            yield from ((path, one) for one in (each if isinstance(each, tuple) else [each]) if one)


def state(text: str, roots: Roots) -> dict[str, Any]:
    """Returns what a form shows of a text: the value of each key that applies, which are written, all problems."""
    try:
        located, problems = look(text, roots)
    except ConfigError as error:
        return {"toml": text, "values": None, "written": [], "problems": _told(error)}
    assert located.layered is not None
    tree = located.layered.tree
    written = _by_path(tree)
    values = flat(located.config)
    shown_as = {path: _shown(values.get(path, value), keys()[path]) for path, value in values.items()}
    shown_as |= {path: _shown(value, keys()[path]) for path, value in written.items() if path in keys()}
    told = [{"key": p.key, "line": _line_of(p.place), "message": in_the_window(p.message)} for p in problems]
    return {"toml": text, "values": shown_as, "written": list(written), "problems": told}


def _by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{s}.{n}": value for s, table in tree.items() if isinstance(table, dict) for n, value in table.items()}


def _shown(value: Any, key: Key) -> Any:
    """Returns a value as a field of its kind has it: a switch's, and lines, as they are, any other as text."""
    if isinstance(value, bool) and _kind(key) == "switch":
        return value
    if _kind(key) == "lines" and isinstance(value, tuple | list):
        lines = [getattr(each, "short", each) for each in value]
        return lines if all(isinstance(line, str) and "\n" not in line for line in lines) else toml_value(value)
    return value if isinstance(value, str) else toml_value(value)


def _line_of(place: str) -> int:
    name, _, line = place.rpartition(":")
    return int(line) if name and line.isdecimal() else 0


def _told(error: BaseException) -> list[dict[str, Any]]:
    """Returns the problems that an error reports, one for each line that names its key or place."""
    told: list[dict[str, Any]] = []
    for line in in_the_window(str(error)).splitlines():
        place, bare = _LINE.fullmatch(line), _BARE.fullmatch(line)
        if place:
            told.append({"key": place[2] or "", "line": int(place[1] or 0), "message": place[3]})
        elif bare and bare[1] in keys():
            told.append({"key": bare[1], "line": 0, "message": bare[2]})
        elif told:
            told[-1]["message"] += f"\n{line}"
        else:
            told.append({"key": "", "line": 0, "message": line})
    return told


def changed(text: str, path: str, value: str | bool | list[str] | None, roots: Roots) -> dict[str, Any]:
    """Returns the state of the text with one value changed, which is read as `--set` reads it; None: its default.

    Raises ConfigError for a key that there is not, or that has no line of its own.
    """
    key = _key(path)
    if isinstance(value, str) and key.annotation is not str:
        value = typed(value.strip(), key)
    return state(_put(text, path, value), roots)


def begun(
    family: str, purpose: str | None, card: float | None, given: Mapping[str, str], before: str, template: str
) -> dict[str, Any]:
    """Returns the text of a preset with the `given` values by path, and where each of its values comes from.

    Args:
        family: the family of the base.
        purpose: a preset's name.
        card: GB of the card.
        given: values by path, such as the base and the folder.
        before: the text so far; what was changed in it by hand stays.
        template: what the text so far was made from, as this function returned it; empty: it was opened.

    Raises ConfigError for a key that there is not, or that cannot be changed by itself.
    """
    new = init.template(family, purpose, card)
    text = _moved(before, template, init.template(family, None, None), new) if before else new
    text = _with_values(text, given)
    sources = init.preset(family, purpose, card).sources if purpose or card else {}
    return {"toml": text, "template": new, "sources": dict(sources)}


def _moved(before: str, template: str, plain: str, new: str) -> str:
    """Returns a text with the values of a new template, where it has still those of its own.

    One that was opened has no template: what it lacks becomes that in which `new` differs from the `plain` one.
    """
    tree, old = parse(before, NAME)[0], template or plain
    mine, was, will = (_by_path(each) for each in (tree, parse(old, NAME)[0], parse(new, NAME)[0]))
    own = {path: mine[path] for path in keys() if path in mine and mine[path] != was.get(path)}
    if _with_values(old, own) == before:  # nothing but values was changed: the new one's comments fit
        return _with_values(new, own)
    to = {path: will.get(path) for path in was | will if will.get(path) != was.get(path)}
    still = {p: v for p, v in to.items() if mine.get(p) == was.get(p) or (not template and p not in mine)}
    tables = {path: v for path, v in still.items() if isinstance(tree.get(path.split(".")[0], {}), dict)}
    heads = [each.partition("\n\n")[0] for each in (old, new)]  # they name the preset
    return _with_values(before.replace(heads[0], heads[1], 1), tables)


def _with_values(text: str, values: Mapping[str, Any]) -> str:
    for path, value in values.items():
        text = _put(text, path, value)
    return text


def _put(text: str, path: str, value: Any) -> str:
    key = _key(path)
    try:
        return with_value(text, key.section, key.name, None if value is None else toml_value(value))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _key(path: str) -> Key:
    if path not in keys():
        raise ConfigError(f"{shown(path)}: expected a key")
    return keys()[path]


def imported(name: str, text: str, family: str, partial: bool) -> dict[str, Any]:
    """Returns a dropped file as a text of ours: that of another trainer's config, or the file itself.

    Raises ConfigError for what is no config, or loses what decides the result, unless `partial`.
    """
    plain = re.sub(r"[^\w.-]", "_", name)[-80:].lstrip(".") or "config.toml"
    if Path(plain).suffix.lower() in (".toml", ".yaml", ".yml") and program_of(parse(text, plain)[0]) is None:
        if Path(plain).suffix.lower() != ".toml":
            raise ConfigError(f"{plain}: expected TOML, or another trainer's config; write it as TOML")
        return {"toml": text, "from": "flame-train"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, plain)
        file.write_text(text, encoding="utf-8")
        try:
            result = import_config(str(file), None, family, partial=partial)
            result = json.loads(json.dumps(result).replace(f"{folder}/", ""))
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from None
    kept = ("from", "listed", "missing", "needless")
    count = len(result["carried"]) + sum(map(len, result["sets"]))
    return {"toml": result["config"], "carried": count} | {name: result[name] for name in kept}


# ---- the plan


class Planner:
    """Plans one text after another. A request of a page that has sent a newer one ends, or does not begin."""

    def __init__(self, roots: Roots) -> None:
        self._roots, self._one = roots, threading.Lock()
        self._newest: dict[str, StopRequest] = {}

    def plan(self, text: str, device: str, card: float | None, page: str, confirmed: Collection[str]) -> dict[str, Any]:
        """Returns the report of a dry run, whether it fits a `card` of so many GB, notes, and the room on the disk.

        Or all its problems.

        The hub is asked only where every name of it in the text is `confirmed`: others are half-typed, or a stranger's.
        """
        mine = StopRequest()
        before, self._newest[page] = self._newest.get(page), mine
        if before is not None:
            before.ask()
        with self._one:
            try:
                mine.check("before it was planned")
                return self._planned(text, device, card, mine, confirmed)
            except Interrupted:
                return {"superseded": True}
            finally:
                if self._newest.get(page) is mine:
                    del self._newest[page]

    def _planned(
        self, text: str, device: str, card: float | None, stop: StopRequest, confirmed: Collection[str]
    ) -> dict[str, Any]:
        try:
            located, problems = look(text, self._roots)
        except ConfigError as error:
            return {"problems": _told(error)}
        if problems:
            return {"problems": state(text, self._roots)["problems"]}
        of_hub = {value for _, value in _places(located.config) if is_hub_name(value)}
        fetch: Fetch = "headers" if of_hub <= set(confirmed) else "nothing"
        with _warnings() as notes:
            try:
                with with_key_names(located):
                    report = dry_run_of(located, None, Session(device, stop=stop), fetch)
            except Interrupted:
                raise
            except FlameError as error:
                return {"problems": _told(error), "notes": notes}
        free = round(free_bytes(Path(located.config.output.dir)) / _GIB, 1)
        told = {"text": in_the_window(as_text(report)), "verdict": in_the_window(verdict(report, card))}
        return {"plan": report, **told, "notes": notes, "free_disk_gib": free}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what this thread warns of."""
    notes: list[str] = []
    thread, handler = threading.get_ident(), logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(in_the_window(record.getMessage()))  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.thread == thread)
    logger = logging.getLogger("flame_train")
    logger.addHandler(handler)
    try:
        yield notes
    finally:
        logger.removeHandler(handler)


def written(text: str, path: str, device: str, force: bool, roots: Roots) -> dict[str, Any]:
    """Writes the text as a file, and returns the command that trains it.

    Raises:
        ConfigError: something in it is wrong, or the path has no .toml, or lies outside of the roots.
        OutputError: the file cannot be written, or is there already and `force` is not said.
    """
    _, problems = look(text, roots)
    if problems:
        raise ConfigError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))
    place, raw = roots.place(path), text.encode()
    refuse_place(place, ".toml", force)
    with roots.entry(str(place), make=True) as entry:
        if place.name == QUEUE or (place.name == "config.toml" and entry.folder.lstat("status.json") is not None):
            raise ConfigError(f"{place}: belongs to the queue or to a run; choose another name")
        write_atomically(entry, [raw], len(raw))
    words = ["flame-train", "train", str(place), *(["--device", device] if device != "cuda" else [])]
    return {"path": str(place), "command": shlex.join(words)}


def set_of(config: Config, number: int) -> DataSet:
    """Returns a set of images by its number. Raises ConfigError."""
    sets = image_sets(config.data, config.captions)
    if not 0 <= number < len(sets) or not sets[number].path:
        raise ConfigError("data.path: expected a folder of images; choose one")
    return sets[number]


def families() -> dict[str, Any]:
    """Returns each family: its title, keys that it lacks, presets, and names of published weights on the hub."""
    return {
        name: {
            "title": family.title,
            "lacks": sorted(family.unsupported_keys()),
            "presets": init.names(name),
            "published": [f"hf:{licence.model}" for licence in licences(name)],
        }
        for name, family in FAMILIES.items()
    }
