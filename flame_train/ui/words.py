"""Messages of the loader and of the plan in the window's words: where they name an option, the window has a place."""

from __future__ import annotations

import re
from typing import Final

from flame_train.errors import lines_shown

_IN_THE_WINDOW: Final = (
    (r"; add --family [\w ]+", "; choose it"),
    (r"--family \w+: this config", "this config"),
    (r"`--partial` writes the file all the same", "the rest can be taken all the same"),
    (r", remove it, or say --force", ", or replace it"),
    (r"; --root names further folders", "; this window was started for these alone"),
    (r"the folders of --root", "the folders that this window was started for"),
    (r"--device cuda", "the GPU"),
    (r"and --device is cpu; remove it, or plan for a GPU by --dry-run", "and the device is the CPU; remove it"),
    (r"--device cpu", "the CPU as device"),
    (r"--memory auto lets", 'memory.budget = "auto" lets'),
    (r", or start without --dry-run", ", or start the training"),
    (r"; without its headers: (.*?), or start", r"; to plan without its headers: \1, or start"),
    (r"only a command that works with it fetches it: no --dry-run", "training fetches it"),
    (r" of a config, --t5-vocabulary of sample", ""),
    (r",? ?\((?:in )?sample: --[^)]*\)", ""),
    (r"--lora of sample names LoRAs", "LoRAs are not named in a prompt"),
    (r"--preset", "purpose"),
    (r"; `flame-train init FAMILY` writes all there are", "; the search above the fields finds all there are"),
    (r"; `flame-train init` writes a template", "; choose a base model to begin with"),
    (r"`flame-train import \S+ -o my.toml` makes one of ours of it", "drop its file onto this page"),
    (r"; `flame-train dataset` shows them all", ""),
)


def in_the_window(message: str) -> str:
    """Returns a message in the window's words, with whatever would steer a terminal or a page escaped."""
    for pattern, words in _IN_THE_WINDOW:
        message = re.sub(pattern, words, message)
    return lines_shown(message)
