"""Writes `configs/` anew: `reference.toml` with every key, and two short configs a family, as `init` makes them.

python scripts/write_configs.py
"""

from __future__ import annotations

from pathlib import Path

from flame_train.config.render import commented
from flame_train.config.schema import Config
from flame_train.families import FAMILY_TITLES
from flame_train.tools.init import template

FOLDER = Path(__file__).parents[1] / "configs"
PRESETS = ("character", "style")
TITLE = (
    "Every key with its default and its meaning. `flame-train init FAMILY` writes those that mean something to a family"
)


def configs() -> dict[str, str]:
    """Returns the generated files by name."""
    short = {f"{family}-{name}.toml": template(family, name) for family in FAMILY_TITLES for name in PRESETS}
    return {"reference.toml": commented(Config(), TITLE), **short}


if __name__ == "__main__":
    for name, text in configs().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
