"""Prompts of sample images, each a string or a table, and files of them as kohya's trainers read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flame_train.config.parse import KeyPath, parse
from flame_train.data.caption_formats import hidden
from flame_train.data.clips import MAX_FRAMES
from flame_train.data.file_reading import read_bytes
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.errors import ConfigError, DataError
from flame_train.settings import Section, field, one_or_several

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
        return read_bytes(path, limit=MAX_BYTES).decode("utf-8-sig")
    except DataError as error:
        raise ConfigError(f"sample.prompt_file: {error}") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"sample.prompt_file: {path}: expected UTF-8 text, got {error}") from None


_FLAG = re.compile(r"(?:^|\s)--(?=[A-Za-z])")
_WORD = re.compile(r"([A-Za-z][\w-]*)(?:[\s=]+(.*))?", re.DOTALL)

Value = str | int | float

FLAGS: dict[str, tuple[str, Callable[[str], Value], str]] = {
    "n": ("negative", str, "text"),
    "w": ("width", int, "a whole number"),
    "h": ("height", int, "a whole number"),
    "d": ("seed", int, "a whole number"),
    "s": ("steps", int, "a whole number"),
    "l": ("guidance_scale", float, "a number"),
    "g": ("guidance_scale", float, "a number"),
    "ss": ("sampler", str, "a sampler"),
    "f": ("frames", int, "a whole number"),
    "am": ("strength", float, "a number"),
    "ci": ("control", str, "a file"),
}
"""Flag -> the key of a prompt that it stands for, how its value is read, and what is expected."""

_KNOWN = ", ".join(f"--{flag} ({key})" for flag, (key, _, _) in FLAGS.items())


def read_flags(line: str) -> dict[str, Any]:
    """Returns the keys of a prompt that a line writes.

    Raises ValueError for a flag that is unknown, twice there or no number.

    `--l` is the scale of classifier-free guidance and `--g` an input of Flux. Here they are one key. So
    `--l 1` beside `--g`, which is without classifier-free guidance, says nothing.
    """
    text, *parts = _FLAG.split(line)
    prompt: dict[str, Any] = {"text": text.strip()}
    flags: dict[str, Value] = {}
    for part in parts:
        flag, value = _flag(part)
        if flag in flags:
            raise ValueError(f"--{flag} is there twice")
        flags[flag] = value
    if flags.get("l") == 1.0 and "g" in flags:
        del flags["l"]
    if "l" in flags and "g" in flags:
        raise ValueError("expected --l or --g, got both: here they are one guidance_scale")
    return prompt | {FLAGS[flag][0]: value for flag, value in flags.items()}


def _flag(part: str) -> tuple[str, Value]:
    match = _WORD.fullmatch(part.strip())
    flag = match.group(1) if match else part.split(maxsplit=1)[0]
    if match is None or flag not in FLAGS:
        raise ValueError(f"unknown flag --{flag}; known are {_KNOWN}")
    _, read, expected = FLAGS[flag]
    raw = (match.group(2) or "").strip()
    try:
        value = read(raw)
    except ValueError:
        value = ""
    if value == "" and flag != "n":
        raise ValueError(f"--{flag}: expected {expected}, got {raw!r}")
    return flag, value


_ANY_FLAG: Final = "|".join(FLAGS)
_READ_ELSEWHERE: Final = (
    (rf"(?:^|(?<=\s))-(?:{_ANY_FLAG})[\s=]+\S+", "a flag has two dashes"),
    (rf"(?:^|(?<=\s))[\u2013\u2014]+\s?(?:{_ANY_FLAG})[\s=]+\S+", "a flag has two dashes, which an editor joined"),
    (r"\[(?:trigger|name)\]", "captions alone replace it: write the word"),
    (r"\bTRIGGER\b", "init's sign for a word of yours: write it"),
    (r"[(\[][^()\[\]]*:\s*[-+]?\d+(?:\.\d+)?\s*[)\]]", "no weights are read"),
    (r"\(\([^()]+\)\)|\[(?!(?:trigger|name)\])[^\[\]]+\]", "no weights are read"),
    (r"\\[()\[\]]", "no backslash is needed"),
    (r"\bBREAK\b", "no part of a prompt is encoded alone"),
    (r"<\w+:[^<>]+>", "--lora of sample names LoRAs"),
    (r"__[\w/-]+__|\{[^{}]*\|[^{}]*\}", "only captions have wildcards"),
    (r"^\s*(?:Negative prompt:.*|Steps: \d+,.*)", "a negative prompt is --n TEXT"),
)


def unread(prompts: Iterable[str]) -> str:
    """Returns one line on what is drawn as text in `prompts`; empty if nothing looks like a setting."""
    reasons: dict[str, str] = {}
    for text in prompts:
        for pattern, reason in _READ_ELSEWHERE:
            if match := re.search(pattern, text):
                reasons.setdefault(reason, match.group().strip()[:40])
        if unseen := hidden(text):
            reasons.setdefault("nobody sees it", unseen)
    listed = ", ".join(f"{match!r} ({reason})" for reason, match in reasons.items())
    return f"prompts hold what other programs read and this one draws as text: {listed}" if listed else ""


class Prompt(Section):
    """One `[[sample.prompts]]`: a text, and what its image has in place of the keys of `[sample]`."""

    text: str = field("", "the prompt")
    negative: str | None = field(None, "negative prompt")
    seed: int | None = field(None, "seed", ge=0, le=2**63 - 1)
    width: int | None = field(None, "image width", ge=8, le=8192, multiple_of=8)
    height: int | None = field(None, "image height", ge=8, le=8192, multiple_of=8)
    frames: int | None = field(None, "frames; more than one make a clip", ge=1, le=MAX_FRAMES)
    steps: int | None = field(None, "sampler steps", ge=1, le=1000)
    guidance_scale: float | None = field(None, "guidance scale", ge=1, le=1000)
    sampler: str | None = field(None, "sampler")
    control: tuple[str, ...] | None = field(None, "control images", place=True)
    strength: float | None = field(None, "factor of the LoRA's update; 0: the base model", ge=-100, le=100)

    @model_validator(mode="before")
    @classmethod
    def _of_string(cls, value: Any) -> Any:
        """Reads a string as a prompt with flags, and a sampler by the name that other programs have for it."""
        keys = read_flags(value) if isinstance(value, str) else value
        if isinstance(keys, dict) and isinstance(keys.get("sampler"), str):
            name = keys["sampler"].lower()
            known = {other: own for own, kind in SAMPLERS.items() for other in kind.aka}
            keys = keys | {"sampler": known.get(name, name)}
        return keys

    @field_validator("sampler")
    @classmethod
    def _known_sampler(cls, value: str | None) -> str | None:
        if value is None or value in SAMPLERS:
            return value
        *first, last = (f"'{name}'" for name in SAMPLERS)
        raise PydanticCustomError("literal_error", f"Input should be {', '.join(first)} or {last}")

    @field_validator("control", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        return one_or_several(value)

    @property
    def short(self) -> str | None:
        """The string that stands for this prompt, if it has nothing but a text."""
        return self.text if self.model_fields_set == {"text"} and not _FLAG.search(self.text) else None


def problem(found: Any) -> str:
    """Returns one of pydantic's errors about a prompt, in words."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    name = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        return f"{name}: unknown key; a prompt has {', '.join(Prompt.model_fields)}"
    return f"{name}: {found['msg'].lower()}, got {found['input']!r}"
