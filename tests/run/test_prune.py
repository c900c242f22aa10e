"""`cache --prune` removes what no config uses, and nothing else."""

from __future__ import annotations

import shutil

import pytest

from flame_train.config.render import resolved
from flame_train.errors import ConfigError
from flame_train.run.check.check_run import check
from flame_train.run.commands.prune import prune_cache
from flame_train.run.commands.stages import fill_cache, train
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest


@pytest.fixture
def encoded(drawn):
    """A cache of this test alone."""
    return drawn / ".flame-cache"


@pytest.fixture
def configs(small_config, tmp_path):
    """A folder with one config, and a second config elsewhere; the cache has what both use."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "a.toml").write_text(resolved(small_config()))
    other = tmp_path / "b.toml"
    other.write_text(resolved(small_config(data={"resolution": 64, "flip": True})))
    for path in (folder / "a.toml", other):
        fill_cache(str(path), [], "cpu", False)
    return folder, other


def entries(drawn):
    return set((drawn / ".flame-cache").rglob("*.safetensors"))


def test_what_no_config_uses_goes_and_the_rest_stays(configs, drawn):
    folder, other = configs
    before = entries(drawn)
    source = str(folder / "a.toml")
    told = prune_cache(source, [], folder, True)
    assert entries(drawn) == before
    size = sum(path.stat().st_size for path in before)
    found = prune_cache(source, [], folder, False)
    left = entries(drawn)
    assert found == told
    assert (found["removed"], found["kept"]) == (24, len(left))
    assert size - sum(path.stat().st_size for path in left) == found["bytes"]
    assert fill_cache(source, [], "cpu", False)["encoded"] == 0
    assert fill_cache(str(other), [], "cpu", False)["encoded"] == 24


def test_what_lies_behind_a_link_stays(configs, drawn, tmp_path):
    folder, _ = configs
    cache, key = drawn / ".flame-cache", "0a" + "0" * 62
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{key}.safetensors").write_text("precious")
    for part in ("0a", "0b"):  # the second has an entry of another folder, and a link in place of one
        shutil.rmtree(cache / part, ignore_errors=True)
    (cache / "0a").symlink_to(elsewhere)
    (cache / "0b").mkdir()
    (cache / "0b" / f"{key}.safetensors").write_text("not of this folder")
    (cache / "0b" / f"0b{key[2:]}.safetensors").symlink_to(elsewhere / f"{key}.safetensors")
    prune_cache(str(folder / "a.toml"), [], folder, False)
    assert (elsewhere / f"{key}.safetensors").read_text() == "precious"
    assert len(list((cache / "0b").iterdir())) == 2


def test_a_config_in_the_folder_keeps_its_entries(configs, drawn):
    folder, other = configs
    other.rename(folder / "b.toml")
    before = entries(drawn)
    assert prune_cache(str(folder / "a.toml"), [], folder, False)["removed"] == 0
    assert entries(drawn) == before


def test_a_config_that_cannot_be_read_keeps_everything(configs, drawn, tmp_path):
    folder, _ = configs
    (folder / "c.toml").write_text("[data]\npath = 3\n")
    before = entries(drawn)
    with pytest.raises(ConfigError, match=r"c\.toml: what this config uses is not known, so nothing was removed"):
        prune_cache(str(folder / "a.toml"), [], folder, False)
    with pytest.raises(ConfigError, match="expected a folder of configs"):
        prune_cache(str(folder / "a.toml"), [], tmp_path / "images", False)
    assert entries(drawn) == before


def test_the_plan_says_what_the_cache_takes(small_config, drawn, tmp_path):
    """Files have a header of about 300 bytes each beside it."""
    config = small_config(data={"flip": True}, captions={"shuffle": True, "separator": " ", "variants": 3})
    plan = make_plan(check(config), StopRequest())
    predicted = plan.encoding.bytes_of(plan.samples, plan.prompts)
    path = tmp_path / "x.toml"
    path.write_text(resolved(config))
    train(str(path), ["train.steps=1"], "cpu", False)
    files = entries(drawn)
    taken = sum(path.stat().st_size for path in files)
    assert 0 < taken - predicted < 600 * len(files)
