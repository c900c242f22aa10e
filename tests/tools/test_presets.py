"""Presets of init: each loads when its required keys are filled in, says its source, and means the same in full."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from PIL import Image

from flame_train import cli
from flame_train.config.keys import keys
from flame_train.config.load import load
from flame_train.errors import ConfigError
from flame_train.models.registry import FAMILIES
from flame_train.run.commands.stages import train
from flame_train.tools.init import cards, names, preset, recipes, template

FILLED = ("model.checkpoint=a", "data.path=b", "output.dir=c")


@pytest.mark.parametrize("family", recipes())
@pytest.mark.parametrize("name", [None, "character", "style", "concept", "edit"])
@pytest.mark.parametrize("card", [None, 24, 40])
def test_a_preset_is_short_loads_and_is_the_same_in_full(
    tmp_path: Path, family: str, name: str | None, card: int | None
) -> None:
    if (name is None and card is None) or (name is not None and name not in names(family)):
        return
    files = {full: tmp_path / f"{full}.toml" for full in (False, True)}
    for full, file in files.items():
        file.write_text(template(family, name, card, full), encoding="utf-8")
    text = files[False].read_text(encoding="utf-8")
    assert text.count("Source: ") == (name is not None)
    measured = name != "edit" and any(row["gb"] <= (card or 0) for row in cards(family))
    assert text.count("Measured: ") == measured
    assert 2 * len(text.splitlines()) < len(files[True].read_text(encoding="utf-8").splitlines())
    short, full = (load(str(file), FILLED) for file in files.values())
    assert short == full
    allowed = set(keys()) - set(FAMILIES[family].unsupported_keys())
    assert set(preset(family, name, card).values) <= allowed
    assert short.memory.budget == ("" if card is None or measured else f"{card} GB")
    assert short.validation.fraction == (0.1 if name else 0.0)


@pytest.mark.parametrize("name", ["character", "style", "concept"])
def test_what_must_be_filled_in_is_marked_and_comes_first(name: str) -> None:
    lines = template("sdxl", name).splitlines()
    marked = [line.split(" = ")[0] for line in lines if "# <--" in line]
    assert marked == ["checkpoint", "path", "dir", "name"] + ["trigger", "prompts"] * (name != "style")
    for section in ("[model]", "[data]", "[output]"):
        assert "# <--" in lines[lines.index(section) + 1]
    assert tomllib.loads("\n".join(lines))["model"]["checkpoint"] == ""


def test_a_family_without_a_published_recipe_says_so() -> None:
    with pytest.raises(ConfigError, match="got pixart, for which no recipe"):
        preset("pixart", "character", None)


@pytest.mark.parametrize("size", ["8", "8GB", "8 GB", "8GiB", "8.0gb"])
def test_any_card_is_read_and_one_without_a_measurement_gets_a_budget(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for family in FAMILIES:
        assert cli.run(["init", family, "--card", size]) == 0
        assert tomllib.loads(capsys.readouterr().out)["memory"] == {"budget": "8 GB"}, family


@pytest.mark.parametrize("size", ["big", "0", "-3", "12TB", ""])
def test_what_is_no_card_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "sdxl", f"--card={size}"]) == 2
    assert "such as 12 or 12GB" in capsys.readouterr().err


def test_the_presets_are_the_files() -> None:
    assert names() == ["character", "concept", "edit", "style"]


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="expected one of character, concept, edit, style, got stile; did you mean style"
    ):
        template("sdxl", "stile")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_for_edits_is_of_the_families_whose_models_take_control_images(tmp_path: Path, family: str) -> None:
    """A dry run on a small base opens the model, which says so itself, and resolves the layers."""
    FAMILIES[family].write_small_base(tmp_path, 3)
    named = tmp_path / "qwen-image-edit-2511.safetensors" if family == "qwenimage1" else tmp_path / "base.safetensors"
    (tmp_path / "base.safetensors").rename(named)
    for folder, seed in (("before", 1), ("after", 2)):
        (tmp_path / folder).mkdir()
        for name in ("IMAGE", "OTHER"):
            Image.effect_noise((64, 64), 20.0 * seed).convert("RGB").save(tmp_path / folder / f"{name}.png")
            (tmp_path / folder / f"{name}.txt").write_text("make it night", encoding="utf-8")
            seed += 2
    filled = {
        "model.checkpoint": named,
        "data.path": tmp_path / "after",
        "data.control": tmp_path / "before",
        "data.cache": tmp_path / "cache",
        "data.resolution": 64,
        "data.bucket_step": 32,
        "output.dir": tmp_path / "run",
        "sample.control": tmp_path / "before" / "IMAGE.png",
        "train.precision": "fp32",
    }
    config = tmp_path / "config.toml"
    has_it = "edit" in names(family)
    if has_it:
        config.write_text(template(family, "edit"), encoding="utf-8")
    else:
        with pytest.raises(ConfigError, match=f"--preset edit: expected one of flux, .*, got {family}, which"):
            template(family, "edit")
        config.write_text("format = 1\n", encoding="utf-8")
    overrides = [f"{path}={value}" for path, value in filled.items()]
    if has_it:
        plan = train(str(config), overrides, "cpu", True, family)
        assert (plan["images"], plan["validation_images"]) == (1, 1)
        return
    with pytest.raises(ConfigError, match="control"):
        train(str(config), overrides, "cpu", True, family)
