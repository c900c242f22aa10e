"""What the window tells and does of one run, found by its folder: its process, what it says, its files, a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from flame_train.config.render import toml_value
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError, OutputError, shown
from flame_train.io import run_process as process
from flame_train.io.requests import Kind, ask
from flame_train.io.run_output import output_of, said
from flame_train.io.runlog import is_locked
from flame_train.show.run_reader import RunView

_LINES: Final = 200


def told(folder: OpenFolder, roots: Roots) -> dict[str, Any]:
    """Returns whether a run goes on, what it does now, and the last lines that it said, if they lie below the roots."""
    goes_on, output = process.look(folder).alive or is_locked(folder), output_of(folder.path)
    lines = said(folder.path)[-_LINES:] if roots.holds(output) else []
    begins = "its process begins: Python and libraries load"
    return {"goes_on": goes_on, "now": (lines or [begins])[-1] if goes_on else "", "lines": lines}


def loras(view: RunView) -> list[dict[str, Any]]:
    """Returns the LoRAs of a run, the best by validation first."""
    names = [file.name for file in view.files if file.name.endswith(".safetensors") and "/" not in file.name]
    names.sort(key=lambda name: not name.endswith(".best.safetensors"))
    best = f"best by validation: {view.best[1]:.4g} at step {view.best[0]:.0f}" if view.best else ""
    return [
        {"path": shown(name), "about": best if name.endswith(".best.safetensors") else f"step {view.step}"}
        for name in names
    ]


def act(folder: OpenFolder, kind: Kind) -> str:
    """Stops a run, or has it sample or save. Returns what was done. Raises OutputError where it does not go on."""
    if kind == "stop" and process.stop(folder):
        return "it stops as soon as no work is lost"
    if process.look(folder).alive and not is_locked(folder):
        raise OutputError("the run prepares its first step; ask again once it trains")
    ask(folder, kind)
    return {"stop": "it stops", "sample": "it samples", "save": "it saves"}[kind] + " after the present step"


def copied(view: RunView, how: str, taken: Sequence[str]) -> dict[str, str]:
    """Returns a run's config as a text for the form, in a new folder; how: "clone", or "continue" from its last state.

    Raises ConfigError for a run without a config.
    """
    if not view.settings:
        raise ConfigError(f"{view.name}: its config.toml is not there, or is damaged")
    run = view.folder
    free = next(
        place
        for number in itertools.count(2)
        if not (place := run.with_name(f"{run.name}-{number}")).exists() and str(place) not in taken
    )
    values = {each.path: each.value for each in view.settings if each.differs or each.default is None}
    values |= {"output.dir": toml_value(str(free)), "train.continue_from": toml_value(str(run))}
    if how != "continue":
        del values["train.continue_from"]
    lines: list[str] = []
    sections = dict.fromkeys(path.split(".")[0] for path in values)
    for section in sections:
        lines += ["", f"[{section}]"]
        lines += [f"{path.split('.')[1]} = {value}" for path, value in values.items() if path.startswith(f"{section}.")]
    return {"toml": "\n".join(lines[1:]) + "\n", "folder": str(free)}
