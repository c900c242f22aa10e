"""A new run begins with another run's last LoRA and the state of its optimizer, or is refused before anything loads."""

from __future__ import annotations

import json
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.config.load import from_options
from flame_train.config.render import resolved
from flame_train.engine import Parameter
from flame_train.engine.backend import get_backend
from flame_train.errors import ConfigError, FlameError, OutputError
from flame_train.io.commit import commit, newest
from flame_train.optimizers import OPTIMIZERS
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.plan.plan import make_plan
from flame_train.run.train.step_state import build_optimizer
from flame_train.training.result import Sources, carry_over, checkpoint_files, earlier_updates, updates_done
from flame_train.training.session import Session, StopRequest
from tests.recipes.bases import lose_end
from tests.run_files import arrays_of

SHAPES = {"a.lora_down.weight": (4, 24), "a.lora_up.weight": (16, 4), "b.lora_down.weight": (4, 8)}


def optimizer(name, *, earlier=0, schedule="constant", steps=8, lr=1e-2, **train):
    rng = np.random.default_rng(3)
    c = from_options(
        train={"steps": steps, "precision": "fp32", **train},
        optimizer={"name": name, "lr": lr},
        schedule={"name": schedule},
        gradient={"clip_norm": 1.0},
    )
    parameters = [Parameter(rng.standard_normal(shape).astype(np.float32), n) for n, shape in SHAPES.items()]
    cpu = get_backend("cpu")
    return build_optimizer(parameters, c.train, c.optimizer, c.schedule, c.gradient, cpu, earlier=earlier)


def steps(made, which):
    for i in which:
        rng = np.random.default_rng(i)
        made.zero_grad()
        grads = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        made.arena.join(made.arena.grads, grads, "gradients")
        made.step()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def saved(made, folder, step):
    files, _ = checkpoint_files(made, step, Sources("", "", "", ""), {}, 1)
    commit(folder, step, files, keep=1)
    found = newest(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_rule_goes_on_as_if_it_had_never_stopped(name, tmp_path):
    whole = optimizer(name)
    steps(whole, range(6))
    first = optimizer(name)
    steps(first, range(3))
    found = saved(first, tmp_path, 3)
    second = optimizer(name, earlier=updates_done(found))
    carry_over(found, second)
    steps(second, range(3, 6))
    assert_same(second.arena.state(), whole.arena.state())
    again = saved(second, tmp_path / "second", 3)
    assert (earlier_updates(again), updates_done(again)) == (3, 6)


def test_rate_and_schedule_are_those_of_the_new_run(tmp_path):
    first = optimizer("adamw")
    steps(first, range(3))
    found = saved(first, tmp_path, 3)
    fresh = optimizer("adamw", schedule="cosine", lr=0.5)
    second = optimizer("adamw", schedule="cosine", lr=0.5, earlier=3)
    carry_over(found, second)
    for i in range(8):
        steps(fresh, [i])
        steps(second, [i])
        assert second.metrics()["lr"].item() == fresh.metrics()["lr"].item()
        assert second.metrics()["count"].item() == fresh.metrics()["count"].item() + 3


@pytest.mark.parametrize("had", [0.0, 0.9])
def test_a_moving_average_goes_on_or_begins_with_the_values(had, tmp_path):
    first = optimizer("adamw", ema_decay=had)
    steps(first, range(3))
    with first.averaged():
        expected = first.arena.state()
    second = optimizer("adamw", ema_decay=0.9, earlier=3)
    carry_over(saved(first, tmp_path, 3), second)
    with second.averaged():
        assert_same(second.arena.state(), expected)


def train(config):
    with StopRequest() as stop:
        return train_plan(make_plan(check(config), stop), Session("cpu", stop=stop))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the first run of the tests below is kept, once one has made it."""
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def prolonged(small_config, tmp_path, kept):
    """A finished run of two steps, and a function that makes the config of a run that begins with it."""

    def config(folder="second", **sections):
        base = {
            "output": {"dir": str(tmp_path / folder), "precision": "fp32"},
            "train": {"continue_from": str(tmp_path / "run")},
            "schedule": {"name": "constant"},
        }
        return small_config(**{n: base.get(n, {}) | sections.get(n, {}) for n in {**base, **sections}})

    if not kept.exists():
        train(config("run", train={"continue_from": ""}))
        (tmp_path / "run").rename(kept)
    shutil.copytree(kept, tmp_path / "run")
    return config


def test_a_new_run_begins_with_the_lora_and_continues_to_the_bit(prolonged, tmp_path):
    still = train(prolonged("still", optimizer={"lr": 1e-9}))
    before = arrays_of(tmp_path / "run" / "lora.safetensors")
    for name, array in arrays_of(still["lora"]).items():
        np.testing.assert_allclose(array, before[name], atol=1e-7)
    assert still["steps"] == 2

    whole = train(prolonged("whole", train={"steps": 3}))
    train(prolonged("cut", train={"steps": 1}))
    (tmp_path / "run").rename(tmp_path / "away")  # a run that has begun does not need the other one
    cut = train(prolonged("cut", train={"steps": 3}))
    assert_same(arrays_of(cut["lora"]), arrays_of(whole["lora"]))


def test_a_run_that_has_begun_does_not_need_the_lora_that_it_began_with(prolonged, tmp_path):
    first = tmp_path / "run" / "lora.safetensors"
    more = {"lora": {"from": str(first)}, "train": {"continue_from": ""}}
    whole = train(prolonged("whole", **{**more, "train": {"continue_from": "", "steps": 3}}))
    train(prolonged("cut", **more))
    first.unlink()
    with pytest.raises(ConfigError, match=r"lora\.from: .*no such file"):
        train(prolonged("new", **more))
    cut = train(prolonged("cut", **{**more, "train": {"continue_from": "", "steps": 3}}))
    assert_same(arrays_of(cut["lora"]), arrays_of(whole["lora"]))


@pytest.mark.parametrize("old", [False, True])
def test_an_image_whose_mask_changed_is_named(small_config, drawn, tmp_path, old):
    """Of a run that an older version began, which wrote nothing of masks' contents, no image is named in its place."""
    images = shutil.copytree(drawn, tmp_path / "masked")
    paths = sorted(images.glob("*.png"))[:2]
    for path in paths:
        with Image.open(path) as image:
            Image.new("L", image.size, 255).save(path.with_suffix(".mask.png"))
    config = small_config(data={"path": str(images), "masks": "files"}, checkpoint={"every": 1})
    train(config)
    lose_end(tmp_path / "run")
    mask = paths[0].with_suffix(".mask.png")
    with Image.open(mask) as image:
        Image.new("L", image.size, 127).save(mask)
    report = tmp_path / "run" / "dataset.json"
    if old:
        rows = [{k: v for k, v in row.items() if k != "mask_cache"} for row in json.loads(report.read_text())]
        report.write_text(json.dumps(rows))
    named = "" if old else rf" \({paths[0].name} is with another mask\)"
    with pytest.raises(OutputError, match=rf"other images or captions than there are now; put .*back{named} to"):
        train(config)


def test_the_refusal_of_other_settings_ends_with_the_command_that_goes_on(small_config, tmp_path, capsys):
    file = tmp_path / "my config.toml"
    file.write_text(resolved(small_config()))
    line = ["train", str(file), "--device", "cpu"]
    assert cli.run(line) == 0
    capsys.readouterr()
    for more in ((), ("--dry-run",)):
        assert cli.run([*line, "--lr", "0.0003", *more]) == 6
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith("to go on from it with these settings: flame-train train ")
    assert cli.run(shlex.split(told.partition("flame-train ")[2])) == 0
    assert (tmp_path / "run-2" / "lora.safetensors").is_file()
    assert "lr = 0.0003" in (tmp_path / "run-2" / "config.toml").read_text()
    assert cli.run([*line, "--rank", "3"]) == 6
    assert "to go on" not in capsys.readouterr().err, "another rank fits no state"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer": {"name": "lion"}}, r'optimizer\.name +"adamw" +"lion"\n.*lora\.from = ".*lora\.safetensors"'),
        ({"lora": {"rank": 4}}, r"lora\.rank +2 +4"),
        ({"lora": {"alpha": 1.0}}, r"lora\.alpha +2\.0 +1\.0"),
        ({"lora": {"kind": "loha"}}, r'lora\.kind +"lora" +"loha"'),
        ({"lora": {"targets": ("attention+mlp",)}}, r"it has nothing for \d+ layers that lora\.targets choose"),
        ({"lora": {"targets": ("*attn1.to_q",)}}, r"it adapts layers that lora\.targets leave out"),
        ({"train": {"continue_from": "nowhere"}}, "expected the folder of a run, got nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(prolonged, sections, words, tmp_path):
    with pytest.raises(ConfigError, match=rf"(?s)train\.continue_from: .*{words}"):
        train(prolonged(**sections))
    assert not (tmp_path / "second").exists()


def test_a_folder_that_cannot_be_continued_from_is_told(prolonged, tmp_path):
    with pytest.raises(
        OutputError, match=r"(?s)train\.continue_from .*set output\.dir to another folder for a new one"
    ):
        train(prolonged("run"))
    (tmp_path / "run" / "checkpoints" / "step-000002").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        train(prolonged())


def test_a_damaged_checkpoint_of_the_other_run_is_told(prolonged, small_config, tmp_path, caplog, capsys):
    train(small_config(train={"steps": 2}, checkpoint={"every": 1}, output={"dir": str(tmp_path / "other")}))
    (tmp_path / "other" / "checkpoints" / "step-000002" / "optimizer.safetensors").write_bytes(b"")
    file = tmp_path / "second.toml"
    file.write_text(resolved(prolonged(train={"continue_from": str(tmp_path / "other")})))
    for more in (("--dry-run",), ()):
        caplog.clear()
        assert cli.run(["train", str(file), "--device", "cpu", *more]) == 0
        assert caplog.text.count("a newer checkpoint is damaged and was passed over") == 1
    capsys.readouterr()


def test_a_checkpoint_of_another_run_is_refused_by_name(prolonged, tmp_path):
    """Copied there by hand."""
    train(prolonged("other", optimizer={"name": "lion"}, train={"continue_from": ""}))
    train(prolonged("second", train={"continue_from": "", "steps": 1}))
    shutil.copytree(tmp_path / "other/checkpoints/step-000002", tmp_path / "second/checkpoints/step-000002")
    with pytest.raises(OutputError, match=r"step-000002: is of another run"):
        train(prolonged("second", train={"continue_from": "", "steps": 3}))


def test_rates_and_dropout_may_be_others(prolonged):
    done = train(prolonged(lora={"dropout": 0.1}, optimizer={"lr": 3e-4}, data={"batch_size": 2}))
    assert done["steps"] == 2


def test_a_repeated_command_without_the_other_run_is_another_run(prolonged):
    train(prolonged())
    with pytest.raises(FlameError, match=r"train\.continue_from"):
        train(prolonged(train={"continue_from": ""}))


def test_the_option_is_the_key(prolonged, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(resolved(prolonged(train={"continue_from": ""})))
    option = ["--continue-from", str(tmp_path / "run")]
    assert cli.run(["train", "-c", str(path), "--device", "cpu", *option]) == 0
    assert f'continue_from = "{tmp_path / "run"}"' in (tmp_path / "second" / "config.toml").read_text()
    assert cli.run(["train", "-c", str(path), "--device", "cpu", *option, "--set", "optimizer.name=lion"]) in (2, 6)
    capsys.readouterr()
