"""The text of a config on its way: the form that the schema makes, its state, presets under it, and what is opened."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

import flame_train
from flame_train import cli
from flame_train.config.keys import keys
from flame_train.config.load import typed
from flame_train.config.parse import parse
from flame_train.config.prompts import Prompt, read_prompt_file
from flame_train.config.render import toml_value
from flame_train.disk.roots import Roots, within
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES
from flame_train.run.sampling.requests import control_files
from flame_train.tools import init
from flame_train.ui import draft
from flame_train.ui.words import in_the_window


@pytest.fixture
def roots(tmp_path):
    return Roots([tmp_path])


def test_the_form_has_a_field_for_every_key_and_a_kind_that_can_take_it(roots):
    form = draft.form()
    fields = {field["path"]: field for field in form["keys"]}
    assert list(fields) == list(keys())
    assert {"model.checkpoint", "data.path", "output.dir", "lora.rank", "optimizer.lr"} <= set(form["common"])
    assert len(form["common"]) < 40
    assert all(1 < len(field["title"]) < 100 for field in fields.values())
    assert fields["optimizer.lr"]["title"] == "Peak learning rate"
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


OWN = '# mine\n[lora]\nrank = 77 # tried\n\n[[data.sets]]\npath = "a"\n\n[odd]\nx = 1\n'


def test_an_opened_config_keeps_what_it_has_under_another_name_and_purpose(roots):
    named = draft.begun("sdxl", None, None, {"output.name": "fox"}, OWN, "")
    assert named["toml"] == OWN + '\n[output]\nname = "fox"\n'
    purpose = draft.begun("sdxl", "style", None, {}, OWN, "")["toml"]
    assert "rank = 77 # tried\n" in purpose
    assert '[[data.sets]]\npath = "a"\n\n[odd]\nx = 1\n' in purpose
    assert 'targets = ["attention+mlp"]' in purpose


def test_a_key_taken_out_a_comment_and_an_unknown_key_outlive_another_purpose(roots):
    begun = draft.begun("sdxl", "style", 24.0, {"output.dir": "d"}, "", "")
    mine = draft.changed(begun["toml"], "optimizer.lr", None, roots)["toml"] + "# mine\n[odd]\nx = 1\n"
    again = draft.begun("sdxl", "character", None, {}, mine, begun["template"])["toml"]
    assert "# mine\n[odd]\nx = 1\n" in again
    values = parse(again, "x")[0]
    assert ("lr" in values["optimizer"], "batch_size" in values["data"], values["odd"]) == (False, False, {"x": 1})
    assert (values["output"]["dir"], values["sample"]["prompts"][0][:7]) == ("d", "TRIGGER")
    assert "# Preset character" in again
    assert "style" not in again.partition("\n\n")[0]


def test_a_purpose_is_chosen_beside_what_is_no_section_and_unknown_keys_are_refused(roots):
    begun = draft.begun("sdxl", "style", None, {}, "", "")
    again = draft.begun("sdxl", "character", None, {}, "lora = 3\n", begun["template"])
    assert parse(again["toml"], "x")[0]["lora"] == 3
    with pytest.raises(ConfigError, match="expected a key"):
        draft.begun("sdxl", "style", None, {"lora.nothing": "3"}, "", "")


def test_only_confirmed_names_are_looked_up_on_the_hub(roots, monkeypatch):
    asked = []
    monkeypatch.setattr(draft, "dry_run_of", lambda *args: asked.append(args[-1]) or {})
    for told in ("as_text", "verdict"):
        monkeypatch.setattr(draft, told, lambda *args: "")
    text = draft.changed("", "model.checkpoint", "hf:a/b", roots)["toml"]
    text += f'[data]\npath = "{roots.folders[0]}"\n[output]\ndir = "{roots.folders[0]}/run"\n'
    for confirmed in ([], ["hf:a"], ["hf:a/b"]):
        draft.Planner(roots).plan(text, "cpu", None, "page", confirmed)
    assert asked == ["nothing", "nothing", "headers"]


def test_a_prompt_file_names_no_control_image_outside_and_is_no_pipe(roots, tmp_path):
    prompt = Prompt(text="x", control=("/etc/hostname",))
    image = SimpleNamespace(prompt=prompt, control=prompt.control, number=1)
    with within(roots), pytest.raises(ConfigError, match="/etc/hostname: expected a place below"):
        control_files([image], None, 96)
    os.mkfifo(tmp_path / "prompts.txt")
    with pytest.raises(ConfigError, match="a named pipe"):
        read_prompt_file(str(tmp_path / "prompts.txt"))


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


FOREIGN = 'network_module = "networks.lora"\nnetwork_dim = 24\nmax_train_steps = 700\nnoise_offset = "x"\n'
FOREIGN += 'optimizer_type = "AdamW"\noptimizer_args = ["foo=3"]\n'


def test_what_an_import_carried_over_and_dropped_is_counted():
    made = draft.imported("fox.toml", FOREIGN, "sdxl", False)
    written = parse(made["toml"], "x")[0]
    assert made["carried"] == sum(len(table) for table in written.values() if isinstance(table, dict)) - len(EMPTY)
    assert [re.findall("noise_offset|foo", line) for line in made["listed"]] == [["foo"], ["noise_offset"]]
    assert tempfile.gettempdir() not in str(made)
    assert {line.partition(":")[0] for line in made["missing"]} == EMPTY


EMPTY = {"model.checkpoint", "data.path", "output.dir"}
NOT_OF_THE_WINDOW = re.compile(
    r"flame_train/(cli|commands|sweep|distributed|remote|quickstart|show|engine/backend/cuda/libraries|run/finish)|"
    r"tools/(bench|captions|make_adapter|lora_files|merge|extract|verify|sample|doctor)|io/hub_upload|adapters/formats|"
    r"run/commands/(dataset_report|reproduce)|run/plan/start|training/result|ui/words"
)
OPTIONS = {
    option
    for command in get_command(cli.app).commands.values()
    for parameter in command.params
    for option in parameter.opts
    if option.startswith("--")
}


def options_in(text):
    return OPTIONS & set(re.findall(r"--[a-z][\w-]+", text))


def messages():
    """(place, text) of each string of the package that names an option and may be told by the window."""
    for file in sorted(Path(flame_train.__file__).parent.rglob("*.py")):
        if NOT_OF_THE_WINDOW.search(str(file)):
            continue
        nodes = list(ast.walk(ast.parse(source))) if "--" in (source := file.read_text()) else []
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        alone |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in alone:
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
                if options_in(text) and " " in text:
                    yield f"{file.name}:{node.lineno}", text


OF_FILES_AND_COMMANDS = {"init.py", "import_config.py", "roots.py"}  # what init writes; what answers the command alone


def test_no_message_of_the_window_names_an_option_of_the_command_line():
    found = dict(messages())
    assert len(found) > 10
    left = {place: text for place in found if options_in(text := in_the_window(found[place]))}
    assert {place.partition(":")[0] for place in left} <= OF_FILES_AND_COMMANDS, left
