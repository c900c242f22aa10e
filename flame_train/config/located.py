"""A configuration that knows where its keys were written, for messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flame_train.config.keys import keys
from flame_train.config.read import KeyPath, Layered
from flame_train.config.schema import Config
from flame_train.errors import ConfigError, DataError, FlameError, ModelFileError, OutputError, RemoteError


def place_of(layered: Layered, path: KeyPath) -> str:
    """Returns `file:line` of a key, or the file alone."""
    return layered.places.get(path, layered.files[-1])


@dataclass(frozen=True, slots=True)
class ConfigWithSource:
    """A configuration that knows where its keys were written; by itself it was written nowhere."""

    config: Config
    layered: Layered | None = None

    def located(self, message: str) -> str:
        """Returns `message` with its place before each line that begins with a key."""
        return "\n".join(map(self._line, message.splitlines()))

    def origin_of(self, message: str) -> str:
        """`file:line: key` of the key whose file or folder `message` begins with; "" where it begins with none."""
        places = (
            (path, place) for path, place in self._paths() if message.startswith((f"{path}:", f"{path}/", f"{path} "))
        )
        return max(places, key=lambda pair: len(pair[0]), default=("", ""))[1]

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Gives each file and folder that the config names, in the forms that messages have, with its key and place."""
        places = {} if self.layered is None else self.layered.places
        paths: list[tuple[str, KeyPath, Any]] = [
            (key.path, (key.section, key.name), getattr(getattr(self.config, key.section), key.name))
            for key in keys().values()
            if key.place or key.path == "output.remote"
        ]
        paths += [
            (f"data.sets {i + 1}", ("data", "sets", f"[{i}]", part), value)
            for i, one in enumerate(self.config.data.sets)
            for part, value in (("path", one.path), ("control", one.control))
        ]
        for name, path, value in paths:
            for each in filter(None, value if isinstance(value, tuple) else [value]):
                at = places.get(path)
                for form in {each, os.path.abspath(each), os.path.realpath(each)}:
                    yield form, f"{at}: {name}" if at else name

    def _line(self, line: str) -> str:
        key = keys().get(line.partition(":")[0])
        if key is None or self.layered is None:
            return line
        return f"{self.layered.places.get((key.section, key.name)) or place_of(self.layered, (key.section,))}: {line}"


@contextmanager
def with_key_names(located: ConfigWithSource) -> Iterator[None]:
    """Within, an error about a file or folder that the config names says which key names it, and where."""
    try:
        yield
    except (ConfigError, DataError, ModelFileError, OutputError, RemoteError) as error:
        origin = located.origin_of(str(error))
        if origin:
            error.args = (f"{origin}: {error}", *error.args[1:])
        raise


class ErrorCollector:
    """Collects errors about the config and its model files from several `with` blocks and raises them together."""

    def __init__(self, located: ConfigWithSource) -> None:
        self._located = located
        self._found: list[ConfigError | ModelFileError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigError | ModelFileError):
            self._found.append(error)
            return True
        return False

    def raise_all(self) -> None:
        """Raises an error with all that was wrong, if anything was: a ModelFileError if only model files were."""
        if self._found:
            raise together(self._found, self._located)


def together(errors: Sequence[FlameError], located: ConfigWithSource) -> FlameError:
    """Returns one error with the messages of several, each where it was written; of their kind if they are of one."""
    if len(errors) == 1 and not isinstance(errors[0], ConfigError):
        return errors[0]
    lines = []
    for error in errors:
        origin = located.origin_of(str(error))
        lines.append(f"{origin}: {error}" if origin else located.located(str(error)))
    kind = type(errors[0]) if len({type(error) for error in errors}) == 1 else ConfigError
    return kind("\n".join(lines))
