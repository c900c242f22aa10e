"""Files of prompts, as kohya's trainers read them: a prompt a line, or tables in TOML or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from flame_train.config.parse import KeyPath, parse
from flame_train.config.prompts import Prompt, problem
from flame_train.errors import ConfigError

MAX_BYTES = 1 << 20
_TABLES: Final = (".toml", ".json")
_KEYS: Final = MappingProxyType(
    {
        "prompt": "text",
        "negative_prompt": "negative",
        "sample_steps": "steps",
        "sample_sampler": "sampler",
    }
)
"""kohya's name of a key in a table -> that of a prompt. `scale` and `guidance_scale` are one key here, as in lines."""

_Entry = tuple[str | dict[str, Any], KeyPath]  # a prompt as it is written, and its place in the file


def read_prompt_file(path: str) -> tuple[Prompt, ...]:
    """Returns the prompts of a file. Raises ConfigError with all that is wrong, each with its line.

    - `.txt` or any other ending: a prompt a line, with flags; empty lines and those that begin with # are none.
    - `.toml`: a table `[[prompt.subset]]` a prompt; what stands in `[prompt]` holds for all.
    - `.json`: a list of tables, or of strings with flags.
    """
    text = _text(path)
    entries, lines = _tables(text, path) if path.lower().endswith(_TABLES) else _lines(text)
    prompts, wrong = [], []
    for written, place in entries:
        try:
            prompts.append(Prompt.model_validate(_ours(written) if isinstance(written, dict) else written))
        except (ValidationError, ValueError) as error:
            wrong += [f"{path}:{_line(lines, place, at)}: {said}" for at, said in _problems(error)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    if not prompts:
        raise ConfigError(f"sample.prompt_file: expected prompts, got none in {path}")
    return tuple(prompts)


def _lines(text: str) -> tuple[list[_Entry], dict[KeyPath, int]]:
    numbered = [(str(n), line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    entries: list[_Entry] = [(line, (n,)) for n, line in numbered if line and not line.startswith("#")]
    return entries, {(n,): int(n) for n, _ in numbered}


def _tables(text: str, path: str) -> tuple[list[_Entry], dict[KeyPath, int]]:
    """Returns the tables of a TOML or JSON file. Raises ConfigError for one of another form."""
    tree, lines = parse(text, path)
    shared: Any = {}
    place: KeyPath
    if path.lower().endswith(".json"):
        found, place = tree.get(""), ("",)
        form = "a list of prompts"
    else:
        shared = tree.get("prompt")
        found, place = shared.get("subset") if isinstance(shared, dict) else None, ("prompt", "subset")
        form = "a table [[prompt.subset]] a prompt"
    if not isinstance(found, list) or not all(isinstance(one, dict | str) for one in found):
        raise ConfigError(f"sample.prompt_file: {path}: expected {form}, got something else")
    common = {key: value for key, value in shared.items() if key != "subset"}
    return [
        ({**common, **one} if isinstance(one, dict) else one, (*place, f"[{i}]")) for i, one in enumerate(found)
    ], lines


def _ours(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table with the keys of a prompt. Raises ValueError for two keys that are one here."""
    keys: dict[str, Any] = {}
    scales = {key: table[key] for key in ("scale", "guidance_scale") if key in table}
    if len(scales) == 2 and scales["scale"] == 1:  # no classifier-free guidance: it says nothing
        del scales["scale"]
    if len(scales) == 2:
        raise ValueError("expected scale or guidance_scale, got both: here they are one guidance_scale")
    for key, value in table.items():
        if key in ("scale", "guidance_scale", "enum"):
            continue
        ours = _KEYS.get(key, key)
        if ours in keys:
            raise ValueError(f"{ours} is there twice, under two names")
        keys[ours] = value
    if "text" not in keys:
        raise ValueError("expected the key prompt, got a table without")
    if scales:
        (keys["guidance_scale"],) = scales.values()
    return keys


def _problems(error: ValueError) -> Iterator[tuple[str, str]]:
    """Yields the key of each problem, "" for the whole prompt, and what is said of it."""
    if not isinstance(error, ValidationError):
        yield "", str(error)
        return
    for found in error.errors():
        yield str(found["loc"][0]) if found["loc"] else "", problem(found)


def _line(lines: Mapping[KeyPath, int], place: KeyPath, key: str) -> int:
    """Returns the line of a prompt's key, by whatever name it goes; else that of the prompt."""
    names = (
        key,
        *(theirs for theirs, ours in _KEYS.items() if ours == key),
        "scale" if key == "guidance_scale" else "",
    )
    at = [(*whose, name) for whose in (place, place[:1]) for name in names if name]
    return next((lines[path] for path in (*at, place) if path in lines), 1)


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"sample.prompt_file: expected at most 1 MiB, got more in {path}")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"sample.prompt_file: {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"sample.prompt_file: {path}: expected UTF-8 text, got {error}") from None
