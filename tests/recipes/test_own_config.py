"""A run's own `config.toml` is a config of that run: planned again, it is the same text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.config.load import load_located
from flame_train.config.render import resolved
from flame_train.models.registry import FAMILIES
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest

SETTINGS = [
    (),
    ("text_encoders.cache=off",),
    ('sample.prompts=["a red circle"]', "validation.fraction=0.5", "train.epochs=2"),
    ("model.quantize=int8-convrot", "model.arithmetic=int8", "lora.kind=dora", "optimizer.name=prodigy"),
]


def text_of_plan(config: Path, *settings: str) -> str:
    with StopRequest() as stop:
        return resolved(make_plan(check(load_located(str(config), settings)), stop).config)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_runs_own_config_plans_the_same_run(
    family: str, settings: tuple[str, ...], small_model: Callable[[str], Path], drawn: Path, tmp_path: Path
) -> None:
    given, own = tmp_path / "given.toml", tmp_path / "config.toml"
    given.write_text(
        f'[model]\ncheckpoint = "{small_model(family) / "base.safetensors"}"\n[data]\npath = "{drawn}"\n'
        f'resolution = 64\nbucket_step = 64\n[train]\nprecision = "fp32"\n[output]\ndir = "{tmp_path / "run"}"\n'
    )
    own.write_text(text_of_plan(given, *settings))
    assert text_of_plan(own) == own.read_text()
