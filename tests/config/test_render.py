"""Rendered configs: read back they are what was rendered, and the committed files are current."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.config.keys import applies, keys, sections
from flame_train.config.load import load, problems_in
from flame_train.config.render import comment, commented, decisive, flat, resolved, toml_value
from flame_train.config.schema import FORMAT, Config
from flame_train.models.registry import FAMILIES
from flame_train.tools.init import template
from scripts.write_configs import configs

CONFIGS = Path(__file__).parents[2] / "configs"
SMALLER = sorted(CONFIGS.glob("*-*gb.toml"))


@given(
    st.recursive(
        st.one_of(
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(st.characters(codec="utf-8")),
        ),
        st.lists,
        max_leaves=8,
    )
)
def test_a_value_is_read_back_unchanged(value: object) -> None:
    assert tomllib.loads(f"v = {toml_value(value)}")["v"] == value


def test_a_resolved_config_loads_to_itself(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"checkpoint": 'a "quoted" \\ path', "prediction": "v"},
            "data": {"path": "ünïcode\t\u0007", "caption_dropout": 0.1, "max_tokens": 225},
            "lora": {"targets": ("*.attn1.to_[qk]", "full")},
            "optimizer": {"lr": 1e-7, "betas": (0.5, 0.25)},
            "sample": {"prompts": ("one", 'two "2"')},
            "output": {"dir": "runs/x"},
        }
    )
    path = tmp_path / "config.toml"
    path.write_text(resolved(config), encoding="utf-8")
    assert load(str(path)) == config


def test_a_template_has_every_key_with_its_default_and_unit() -> None:
    text = commented(Config(), "title")
    tree = tomllib.loads(text)
    assert tree.pop("format") == FORMAT
    written = {f"{section}.{name}" for section, table in tree.items() for name in table}
    assert written == {
        path
        for path, key in keys().items()
        if applies(key, getattr(Config(), key.section)) and (key.has_short_form or not key.is_tables)
    }
    assert {"optimizer.momentum", "schedule.cycles", "loss.snr_gamma"} <= keys().keys() - written, "of other choices"
    assert all(keys()[path].only or keys()[path].is_tables for path in keys().keys() - written)
    _check_commented(text, keys().keys() - written)
    for path, key in keys().items():
        if path not in written:
            continue
        section, name = path.split(".")
        value = tree[section][name]
        assert (tuple(value) if isinstance(value, list) else value) == key.default
        lines = text[text.index(f"[{section}]") :].splitlines()
        line = next(line for line in lines if line.startswith(f"{name} = "))
        assert key.doc in line
        assert key.unit in line
        assert key.limits in line


def _check_commented(text: str, elsewhere: set[str]) -> None:
    """Each key of other choices is a comment; without its sign, and with its choice, it is a line that loads."""
    section, found = "", set()
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        told = re.match(r"# (\w+) = .*?  # with (\w+) = (\"\w+\")", line)
        if told is None:
            continue
        found.add(f"{section}.{told[1]}")
        tree = tomllib.loads(f"[{section}]\n{told[2]} = {told[3]}\n{line.removeprefix('# ')}")
        empty = tree[section][told[1]] in ("", [])  # to be filled in
        assert empty or not [problem for problem in problems_in(tree) if problem.key == f"{section}.{told[1]}"]
    assert found == {path for path in elsewhere if keys()[path].only}


def test_a_key_that_choices_share_tells_each_ones_default() -> None:
    text = configs()["reference.toml"]
    for path in ("optimizer.momentum", "optimizer.nesterov", "loss.snr_gamma"):
        key = keys()[path]
        assert len(set(key.defaults.values())) > 1
        (line,) = (line for line in text.splitlines() if line.startswith(f"# {key.name} = "))
        shown = tomllib.loads(line.removeprefix("# "))[key.name]
        for name, default in key.defaults.items():
            assert default == shown or f'"{name}" (default {toml_value(default)})' in line


def test_the_committed_configs_are_the_templates() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in CONFIGS.glob("*.toml") if path not in SMALLER}
    assert written == configs()


def test_a_template_leaves_out_what_means_nothing_to_the_family() -> None:
    for family, recipe in FAMILIES.items():
        tree = tomllib.loads(template(family))
        del tree["format"]
        written = {f"{section}.{name}" for section, table in tree.items() for name in table}
        assert written == set(flat(Config())) - set(recipe.unsupported_keys()) - {"lora.rules", "data.sets"}


def test_settings_that_cannot_change_the_weights_are_left_out_of_the_decisive() -> None:
    left_out = flat(Config()).keys() - decisive(Config()).keys()
    assert {path.partition(".")[0] for path in left_out} == {
        "checkpoint",
        "sample",
        "output",
        "data",
        "gradient",
        "log",
        "memory",
        "model",
        "train",
        "validation",
    }
    assert {path for path in left_out if path.startswith(("data.", "gradient.", "train."))} == {
        "train.epochs",  # train.steps is counted from it
        "data.cache",
        "gradient.checkpointing",
        "gradient.checkpoint_blocks",
    }


@pytest.mark.parametrize("path", SMALLER, ids=lambda path: path.name)
def test_what_smaller_cards_take_is_there_to_be_extended(path: Path, tmp_path: Path) -> None:
    """Each sets what it says and nothing that a user would have to unset."""
    mine = tmp_path / "mine.toml"
    required = '[model]\ncheckpoint = "x"\n[data]\npath = "y"\n[output]\ndir = "z"\n'
    mine.write_text(f'extends = "{path}"\n{required}')
    alone = tmp_path / "alone.toml"
    alone.write_text(required)
    found, usual = flat(load(str(mine))), flat(load(str(alone)))
    changed = {key for key, value in found.items() if value != usual[key]}
    memory = {"model.quantize", "text_encoders.precision", "gradient.checkpointing", "sample.every"}
    assert {"model.quantize", "gradient.checkpointing"} <= changed <= memory


def test_headings_are_data_and_stand_in_docstrings_too():
    """Python may run without docstrings."""
    for name, section in sections().items():
        heading = Config.model_fields[name].description
        assert heading == (section.__doc__ or "").strip().splitlines()[0]
        assert f"# {heading}\n[{name}]\n" in commented(Config(), "a config")


@pytest.mark.parametrize("text", ["a\n[train]\nsteps = 1", "a\r\x00\x1b[2J", "a\udcff\u2028"])
def test_a_comment_ends_with_its_line(text):
    assert tomllib.loads(comment(text)) == {}
    assert comment(text).encode().count(b"\n") == 0
