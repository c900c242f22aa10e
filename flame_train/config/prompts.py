"""Prompts of sample images: each a string or a table."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from flame_train.config.prompt_flags import has_flags, read_flags
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.settings import Section, field, one_or_several

_SAMPLERS = {other: name for name, kind in SAMPLERS.items() for other in kind.aka}


class Prompt(Section):
    """One `[[sample.prompts]]`: a text, and what its image has in place of the keys of `[sample]`."""

    text: str = field("", "the prompt")
    negative: str | None = field(None, "negative prompt")
    seed: int | None = field(None, "seed", ge=0, le=2**63 - 1)
    width: int | None = field(None, "image width", ge=8, le=8192, multiple_of=8)
    height: int | None = field(None, "image height", ge=8, le=8192, multiple_of=8)
    steps: int | None = field(None, "sampler steps", ge=1, le=1000)
    guidance_scale: float | None = field(None, "guidance scale", ge=1, le=1000)
    sampler: Literal[tuple(SAMPLERS)] | None = field(None, "sampler")  # type: ignore[valid-type]
    control: tuple[str, ...] | None = field(None, "control images", place=True)
    strength: float | None = field(None, "factor of the LoRA's update; 0: the base model", ge=-100, le=100)

    @model_validator(mode="before")
    @classmethod
    def _of_string(cls, value: Any) -> Any:
        """A string is a prompt with flags; a sampler may go by the name that other programs have for it."""
        keys = read_flags(value) if isinstance(value, str) else value
        if isinstance(keys, dict) and isinstance(keys.get("sampler"), str):
            name = keys["sampler"].lower()
            keys = keys | {"sampler": _SAMPLERS.get(name, name)}
        return keys

    @field_validator("control", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        return one_or_several(value)

    @property
    def short(self) -> str | None:
        """The string that stands for this prompt, if it has nothing but a text."""
        return self.text if self.model_fields_set == {"text"} and not has_flags(self.text) else None


def problem(found: Any) -> str:
    """Returns one of pydantic's errors about a prompt, in words."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    name = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        return f"{name}: unknown key; a prompt has {', '.join(Prompt.model_fields)}"
    return f"{name}: {found['msg'].lower()}, got {found['input']!r}"
