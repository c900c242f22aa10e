"""Presets of init: each loads when its required keys are filled in, says its source, and means the same in full."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from PIL import Image

from flame_train.config.keys import keys
from flame_train.config.load import load
from flame_train.errors import ConfigError
from flame_train.recipes import FAMILIES
from flame_train.run.commands.stages import train
from flame_train.tools.init import template
from flame_train.tools.presets import cards, names, preset, recipes

FILLED = ("model.checkpoint=a", "data.path=b", "output.dir=c")


@pytest.mark.parametrize("family", recipes())
@pytest.mark.parametrize("name", [None, "character", "style", "concept", "edit"])
@pytest.mark.parametrize("card", [None, 24, 40])
def test_a_preset_is_short_loads_and_is_the_same_in_full(
    tmp_path: Path, family: str, name: str | None, card: int | None
) -> None:
    if (name is None and card is None) or (card is not None and not cards(family)):
        return
    if name is not None and name not in names(family):
        return
    files = {full: tmp_path / f"{full}.toml" for full in (False, True)}
    for full, file in files.items():
        file.write_text(template(family, name, card, full), encoding="utf-8")
    text = files[False].read_text(encoding="utf-8")
    assert text.count("Source: ") == (name is not None)
    assert text.count("Measured: ") == (card is not None)
    assert 2 * len(text.splitlines()) < len(files[True].read_text(encoding="utf-8").splitlines())
    short, full = (load(str(file), FILLED) for file in files.values())
    assert short == full
    allowed = set(keys()) - set(FAMILIES[family].unsupported_keys())
    assert set(preset(family, name, card).values) <= allowed


@pytest.mark.parametrize("name", ["character", "style", "concept"])
def test_what_must_be_filled_in_is_marked_and_comes_first(name: str) -> None:
    lines = template("sdxl", name).splitlines()
    marked = [line.split(" = ")[0] for line in lines if "# <--" in line]
    assert marked == ["checkpoint", "path", "dir"] + ["trigger", "prompts"] * (name != "style")
    for section in ("[model]", "[data]", "[output]"):
        assert "# <--" in lines[lines.index(section) + 1]
    assert tomllib.loads("\n".join(lines))["model"]["checkpoint"] == ""


def test_a_family_without_a_published_recipe_says_so() -> None:
    with pytest.raises(ConfigError, match="got pixart, for which no recipe"):
        preset("pixart", "character", None)


@pytest.mark.parametrize("family", sorted(family for family in FAMILIES if not cards(family)))
def test_a_family_without_a_measured_card_says_so(family: str) -> None:
    with pytest.raises(ConfigError, match=f"no card was measured for {family} yet"):
        preset(family, None, 24)


def test_the_presets_are_the_files() -> None:
    assert names() == ["character", "concept", "edit", "style"]


def test_an_unknown_preset_or_a_card_without_measurement_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="expected one of character, concept, edit, style, got stile; did you mean style"
    ):
        template("sdxl", "stile")
    with pytest.raises(ConfigError, match="expected at least 16 GB for flux"):
        template("flux", None, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_for_edits_is_of_the_families_whose_models_take_control_images(tmp_path: Path, family: str) -> None:
    """A dry run on a small base opens the model, which says so itself, and resolves the layers."""
    FAMILIES[family].write_small_base(tmp_path, 3)
    for folder, seed in (("before", 1), ("after", 2)):
        (tmp_path / folder).mkdir()
        Image.effect_noise((64, 64), 20.0 * seed).convert("RGB").save(tmp_path / folder / "IMAGE.png")
    (tmp_path / "after" / "IMAGE.txt").write_text("make it night", encoding="utf-8")
    filled = {
        "model.checkpoint": tmp_path / "base.safetensors",
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
        assert plan["images"] == 1
        return
    with pytest.raises(ConfigError, match="control"):
        train(str(config), overrides, "cpu", True, family)
