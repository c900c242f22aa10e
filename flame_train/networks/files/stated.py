"""What a folder states of a network beside its weights: the numbers that shapes do not tell, and what must hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flame_train.errors import ModelFileError

_MAX_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Stated:
    """The values of a `config.json`; none where there is no such file. What it does not state is as published."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def beside(cls, path: Path, prefixes: Iterable[str]) -> Stated:
        """That of a network in the folder `path`, or in a folder below it that begins one of the names' `prefixes`.

        A file that is called as diffusers and transformers call theirs has its folder's. Raises ModelFileError for a
        `config.json` that cannot be read, or is no JSON object.
        """
        if not path.is_dir():
            if not path.name.startswith(("diffusion_pytorch_model.", "model.")):
                return cls()
            path = path.parent
        below = (path / prefix.rpartition("/")[0] for prefix in prefixes if "/" in prefix)
        file = next((folder for folder in below if folder.is_dir()), path) / "config.json"
        return cls.read(file) if file.is_file() else cls()

    @classmethod
    def read(cls, file: Path) -> Stated:
        """Returns that in a JSON file. Raises ModelFileError for one that cannot be read, or is no JSON object."""
        try:
            if file.stat().st_size > _MAX_BYTES:
                raise ValueError(f"over {_MAX_BYTES} bytes")
            content = json.loads(file.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("expected an object")
        except (OSError, ValueError, RecursionError) as error:
            raise ModelFileError(f"{file}: cannot be read as JSON ({error}); download the folder again") from error
        return cls(file, content)

    def within(self, key: str) -> Stated:
        """Returns what the object of that key states; nothing if there is none."""
        inner = self.values.get(key)
        return Stated(self.path, inner if isinstance(inner, dict) else {})

    def number(self, key: str, default: float) -> float:
        """Returns a positive number. Raises ModelFileError for anything else."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelFileError(f"{self.path}: {key}: expected a positive number, got {value!r}; mend the file")
        return float(value)

    def whole_numbers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Returns whole numbers of at least 0. Raises ModelFileError for anything else."""
        value = self.values.get(key, default)
        if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
            raise ModelFileError(f"{self.path}: {key}: expected a list of whole numbers, got {value!r}; mend the file")
        return tuple(value)

    def require(self, **expected: object) -> None:
        """Raises ModelFileError, naming all of them, for keys that state something else than `expected`."""
        wrong = [
            f"{key} is {self.values[key]!r}, expected {value!r}"
            for key, value in expected.items()
            if key in self.values and _plain(self.values[key]) != _plain(value)
        ]
        if wrong:
            raise ModelFileError(
                f"{self.path}: {'; '.join(wrong)}: the weights beside it are of another size, or this is a variant "
                "that is not supported here"
            )


NOTHING: Final = Stated()
"""Of a network in a single file: it is as published."""


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
