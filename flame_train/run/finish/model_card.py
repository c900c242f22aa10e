"""The model card of a run: what the hub's page of a LoRA says, made from the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from flame_train.config.keys import keys
from flame_train.families import FAMILY_TITLES, family_data, licence_of, told_terms
from flame_train.io.addresses import HUB, is_hub_name
from flame_train.io.hub_upload import WRITTEN_ANEW
from flame_train.io.json_values import toml_tree
from flame_train.show.run_reader import RunView
from flame_train.version import __version__

_ALWAYS: Final = ("lora.kind", "lora.rank", "lora.alpha", "optimizer.name", "optimizer.lr", "data.resolution")
_TAGS: Final = ("lora", "template:sd-lora", "flame-train")


def model_card(view: RunView, title: str, family: str, lora: str, step: int, images: Sequence[tuple[str, str]]) -> str:
    """Returns the card's text, the same for the same run. It names no folder, and nothing of the dataset.

    Args:
        view: the run.
        title: the heading, where the run has none of its own.
        family: of its base model.
        lora: the name of the LoRA's file.
        step: at which it was saved.
        images: prompt and name of each sample.
    """
    checkpoint = said(view, "model.checkpoint")
    known, trigger = licence_of(family, checkpoint), said(view, "output.trigger") or said(view, "captions.trigger")
    base = hub_model(checkpoint) or (known["model"] if known else "")
    title = said(view, "output.title") or said(view, "output.name") or title
    shown = checkpoint if is_hub_name(checkpoint) else checkpoint.replace("\\", "/").rpartition("/")[2]
    programs = ", ".join(family_data(family).get("loaded_by", ("ComfyUI",)))
    parts = [
        *_front_matter(family, _task(view, family), base, trigger, images, said(view, "output.format") != "kohya"),
        WRITTEN_ANEW,
        f"# {_plain(title)}",
        f"A LoRA for {FAMILY_TITLES.get(family, family)}.",
        *(["<Gallery />"] if images else []),
        *([f"## Trigger words\n\nWrite {_code(trigger)} into the prompt."] if trigger else []),
        f"## Base model\n\n{_code(shown)}. Its licence: {_plain(told_terms(known))}.",
        f"## Use\n\nLoad {_code(lora)} in {programs}.",
        f"## Settings\n\nTrained for {step:,} steps with flame-train {__version__}. Other settings had their "
        f"defaults.\n\n```toml\n{_settings(view)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def said(view: RunView, path: str) -> str:
    """Returns the text that a run's config has under a key; empty: none."""
    value = _value(view, path)
    return value if isinstance(value, str) else ""


def _value(view: RunView, path: str) -> Any:
    text = view.setting(path)
    return toml_tree(f"value = {text}")["value"] if text else ""


def _task(view: RunView, family: str) -> str:
    """Returns what the LoRA is for, by the hub's name of it."""
    if any(data.get("control") for data in ({"control": _value(view, "data.control")}, *_value(view, "data.sets"))):
        return "image-to-image"
    return str(family_data(family).get("pipeline_tag", "text-to-image"))


def hub_model(checkpoint: str) -> str:
    """Returns owner/name of a checkpoint that is on the hub by its name; else empty."""
    return "/".join(checkpoint.removeprefix(HUB).split("/")[:2]) if is_hub_name(checkpoint) else ""


def _front_matter(
    family: str, task: str, base: str, trigger: str, images: Sequence[tuple[str, str]], diffusers: bool
) -> Iterator[str]:
    """Yields the block that the hub reads, as YAML, whose texts are written as JSON's."""
    lines = ["---", "tags:", *(f"- {tag}" for tag in (task, *_TAGS, family)), f"pipeline_tag: {task}"]
    lines += ["library_name: diffusers"] if diffusers else []
    lines += [f"base_model: {_quoted(base)}"] if base else []
    lines += [f"instance_prompt: {_quoted(trigger)}"] if trigger else []
    lines += ["widget:"] if images else []
    for prompt, file in images:
        lines += [f"- text: {_quoted(prompt)}", "  output:", f"    url: {_quoted(file)}"]
    yield "\n".join([*lines, "---"])


def _settings(view: RunView) -> str:
    """Returns the settings on which the weights depend, as TOML; files and folders left out."""
    rows = []
    for setting in view.settings:
        key = keys().get(setting.path)
        if key is None or key.free or key.place or key.table_places:
            continue
        if setting.differs or setting.path in _ALWAYS:
            rows.append(f"{setting.path} = {setting.value}")
    return "\n".join(rows).replace("```", "` ` `")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").replace("\x85", "\\u0085")


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39)).replace(chr(10), ' ')}`"


def _plain(text: str) -> str:
    """Returns text that Markdown shows as it is written."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|" else " " if c == "\n" else c for c in text)
