"""The text of a config on its way: the form that the schema makes, its state, presets under it, and what is opened."""

from __future__ import annotations

import pytest

from flame_train.config.keys import keys
from flame_train.config.load import typed
from flame_train.config.render import toml_value
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES
from flame_train.tools import init
from flame_train.ui import draft


@pytest.fixture
def roots(tmp_path):
    return Roots([tmp_path])


def test_the_form_has_a_field_for_every_key_and_a_kind_that_can_take_it(roots):
    form = draft.form()
    fields = {field["path"]: field for field in form["keys"]}
    assert list(fields) == list(keys())
    assert {"model.checkpoint", "data.path", "output.dir", "lora.rank", "optimizer.lr"} <= set(form["common"])
    assert len(form["common"]) < 40
    assert set(draft.families()) == set(FAMILY_TITLES)
    kinds = {path: fields[path]["kind"] for path in ("lora.rank", "data.flip", "model.quantize", "data.caption")}
    assert kinds == {"lora.rank": "number", "data.flip": "switch", "model.quantize": "choice", "data.caption": "text"}
    for path, value in (("sample.prompts", ["a cat --n bad", "a dog"]), ("lora.targets", ["attention"])):
        assert fields[path]["kind"] == "lines"
        assert draft.changed("", path, value, roots)["values"][path] == value


def test_every_default_comes_back_through_its_field(roots):
    text, section = "", ""
    for path, value in draft.state("", roots)["values"].items():
        key = keys()[path]
        read = typed(value, key) if isinstance(value, str) and key.annotation is not str else value
        text += "" if key.section == section else f"[{key.section}]\n"
        text += f"{key.name} = {toml_value(read)}\n" if value not in ("", []) else ""
        section = key.section
    must = {*init.MUST, "data.sets"}
    assert {problem["key"] for problem in draft.state(text, roots)["problems"]} <= must


def test_what_was_changed_by_hand_stays_when_the_purpose_changes(roots):
    given = {"model.checkpoint": "b", "output.name": "fox"}
    begun = draft.begun("sdxl", "style", 24.0, given, "", "")
    assert begun["sources"]["lora.rank"].startswith("preset style: rank, alpha")
    assert begun["sources"]["data.batch_size"].startswith("a card of 24 GB, measured")
    mine = draft.changed(begun["toml"], "optimizer.lr", "3e-4", roots)["toml"]
    again = draft.begun("sdxl", "character", None, given, mine, begun["template"])
    values = draft.state(again["toml"], roots)["values"]
    assert (values["optimizer.lr"], values["output.name"], values["data.batch_size"]) == ("0.0003", "fox", "1")
    assert values["sample.prompts"][0].startswith("TRIGGER")


def test_a_value_is_read_as_set_reads_it(roots):
    for path, raw, shown in (("lora.rank", "8", "8"), ("optimizer.lr", "1e-4", "0.0001"), ("data.caption", "8", "8")):
        state = draft.changed("", path, raw, roots)
        assert state["values"][path] == shown
        assert path not in [problem["key"] for problem in state["problems"]]
    with pytest.raises(ConfigError, match="expected a key"):
        draft.changed("", "lora.nothing", "8", roots)


def test_an_own_config_is_opened_and_what_extends_another_file_is_refused(roots):
    text = "# mine\n[lora]\nrank = 4\n"
    assert draft.imported("mine.toml", text, "", False)["toml"] == text
    told = draft.state('extends = "/etc/passwd"\n', roots)["problems"]
    assert told == [{"key": "extends", "line": 1, "message": "expected all settings in one text; copy them into it"}]
