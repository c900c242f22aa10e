"""Which settings may differ between a run and its continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flame_train.config.compatibility import differences
from flame_train.config.render import resolved
from flame_train.config.schema import Config
from flame_train.optimizers import OPTIMIZERS


def config(**changes: dict[str, Any]) -> Config:
    return Config.model_validate(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": {"every": 7, "keep": 1}},
        {"sample": {"every": 1, "prompts": ("x",), "guidance_scale": 2.0}},
        {"output": {"dir": "moved", "format": "diffusers", "tensorboard": True}},
        {"data": {"cache": "elsewhere"}},
        {"gradient": {"checkpointing": "mlp", "checkpoint_blocks": ("middle_block.*",)}},
    ],
)
def test_what_does_not_change_the_weights_may_change(changes: dict[str, Any]) -> None:
    assert differences(resolved(Config()), config(**changes)) is None


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("optimizer", "lr", 0.5),
        ("lora", "rank", 3),
        ("train", "seed", 1),
        ("train", "steps", 9),
        ("data", "path", "other"),
        ("model", "checkpoint", "other"),
        ("lora", "targets", ("full",)),
    ],
)
def test_what_changes_the_weights_is_listed(section: str, name: str, value: Any) -> None:
    table = differences(resolved(Config()), config(**{section: {name: value}}))
    assert table is not None
    header, row, *_ = table.splitlines()
    assert header.split() == ["setting", "that", "run", "this", "config"]
    assert row.split()[0] == f"{section}.{name}"


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"name": "cosine"}, "the cosine schedule goes by train.steps: of 40 each step so far would have had another"),
        (
            {"name": "constant", "warmup": 0.1},
            "the warm-up is a share of train.steps: of 40 it takes 4 steps, and took 2",
        ),
    ],
)
def test_more_steps_are_named_for_what_they_change(schedule: dict[str, Any], said: str) -> None:
    table = differences(
        resolved(config(schedule=schedule, train={"steps": 20})), config(schedule=schedule, train={"steps": 40})
    )
    assert table is not None
    assert said in table.splitlines()[-1]
    other = differences(resolved(config(schedule=schedule)), config(schedule=schedule, optimizer={"lr": 0.5}))
    assert said[:12] not in str(other)


def test_a_place_may_be_written_in_another_way_or_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = resolved(config(data={"path": "photos"}, model={"checkpoint": "base.safetensors"}))
    same = config(data={"path": str(tmp_path / "photos")}, model={"checkpoint": "./x/../base.safetensors"})
    assert differences(old, same) is None
    other = config(data={"path": "elsewhere"}, model={"checkpoint": "base.safetensors"}, optimizer={"lr": 0.5})
    assert "data.path" in str(differences(old, other))
    table = differences(old, other, moved=True)
    assert table is not None
    assert [row.split()[0] for row in table.splitlines()] == ["setting", "optimizer.lr"]


def test_a_choice_is_listed_without_the_keys_that_came_with_the_other() -> None:
    table = differences(resolved(Config()), config(optimizer={"name": "sgd"}))
    assert table is not None
    assert [row.split()[0] for row in table.splitlines()] == ["setting", "optimizer.name"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_key_that_is_new_had_the_default_of_its_choice(name: str) -> None:
    """As `nesterov`, which is on for muon and off for sgd."""
    now = config(optimizer={"name": name})
    for key in OPTIMIZERS[name].model_fields:
        older = "\n".join(line for line in resolved(now).splitlines() if not line.startswith(f"{key} ="))
        assert differences(older, now) is None, key


def test_the_table_is_aligned() -> None:
    new = config(optimizer={"lr": 0.5}, lora={"targets": ("full",)})
    assert differences(resolved(Config()), new) == (
        "  setting       that run       this config\n"
        '  lora.targets  ["attention"]  ["full"]\n'
        "  optimizer.lr  0.0001         0.5"
    )


def test_steps_may_change_when_no_rate_depends_on_them() -> None:
    old = config(schedule={"name": "constant"})
    new = config(schedule={"name": "constant"}, train={"steps": 9})
    assert differences(resolved(old), new) is None
    assert differences(resolved(Config()), new) is not None


def test_a_warm_up_that_is_a_share_of_the_run_depends_on_its_steps() -> None:
    for name in ("constant", "inverse_sqrt"):
        old = config(schedule={"name": name, "warmup": 0.1})
        assert differences(resolved(old), config(schedule={"name": name, "warmup": 0.1}, train={"steps": 9}))
        old = config(schedule={"name": name, "warmup_steps": 3})
        new = config(schedule={"name": name, "warmup_steps": 3}, train={"steps": 9})
        assert differences(resolved(old), new) is None


def test_a_key_that_the_older_run_did_not_know_had_its_default() -> None:
    old = "\n".join(line for line in resolved(Config()).splitlines() if not line.startswith("offset_noise"))
    assert differences(old, Config()) is None
    table = differences(old, config(loss={"offset_noise": 0.5}))
    assert table is not None
    assert "loss.offset_noise  0.0       0.5" in table, "what it had, which is what to set it back to"


def test_a_config_that_cannot_be_read_is_another_run() -> None:
    assert differences("[[", Config()) is not None


@pytest.mark.parametrize("was", [r"a\u0000b", "a" * 5000, r"\u001b[2J"])
def test_a_path_that_no_disk_has_differs(was: str) -> None:
    """The config of a run folder may be damaged, or a stranger's."""
    old = resolved(config(data={"path": "images"})).replace('"images"', f'"{was}"')
    table = differences(old, config(data={"path": "images"}))
    assert table is not None
    assert "data.path" in table
