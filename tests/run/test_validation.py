"""Validation in a run: what is held out, that it changes no trained bit, the best checkpoint, and patience."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.load import load_located
from flame_train.data import samples
from flame_train.data.samples import Samples, split
from flame_train.data.sets import DataSet
from flame_train.engine.shape_run import H100
from flame_train.errors import ConfigError, DataError
from flame_train.quickstart.drawings import scenes, write_images
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train
from flame_train.run.encode.encode import encode
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.run.train.step_state import load_networks, make_validator
from flame_train.training.session import Session, StopRequest
from flame_train.training.validation import EarlyStopping, HeldOut
from tests.recipes.bases import lose_end, rewrite_state
from tests.run_files import arrays_of, log_of


@pytest.fixture
def asked(small_base, drawn, tmp_path, encoded):
    """asked(name, **sections): a config whose run is in the folder `name`."""

    def make(name="run", **changed):
        sections = {
            "model": {"checkpoint": str(small_base)},
            "data": {"path": str(drawn), "resolution": 96, "bucket_step": 32, "batch_size": 2, "cache": str(encoded)},
            "lora": {"rank": 2, "alpha": 2.0},
            "optimizer": {"lr": 5e-3},
            "schedule": {"name": "constant"},
            "train": {"precision": "fp32", "steps": 6},
            "checkpoint": {"every": 0},
            "validation": {"fraction": 0.3, "every": 2, "timesteps": 3},
            "output": {"dir": str(tmp_path / name), "title": "tiles"},
        }
        return {n: sections.get(n, {}) | changed.get(n, {}) for n in {**sections, **changed}}

    return make


def planned(source):
    return make_plan(check(load_located(source)), StopRequest())


def same(one, other):
    a, b = arrays_of(one), arrays_of(other)
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


def timeless(validation):
    return {name: value for name, value in validation.items() if name != "seconds"}


# ---- what is held out --------------------------------------------------------------------------------------


def held(source):
    return {row.item.sha256 for row in planned(source).held_out.rows}


def test_the_share_that_was_asked_for_is_held_out_of_few(asked, drawn):
    sides = [held(asked(validation={"fraction": fraction})) for fraction in (0.001, 0.1, 0.25, 0.5)]
    assert [len(side) for side in sides] == [1, 1, 3, 6]
    assert all(one <= other for one, other in pairwise(sides)), "by the order of hashes"
    trained = {row.item.sha256 for row in planned(asked(validation={"fraction": 0.5})).samples.rows}
    assert len(trained | sides[-1]) == 12
    copied = next(path for path in drawn.rglob("*.png") if sha256(path.read_bytes()).hexdigest() in sides[0])
    for ending in (".png", ".txt"):
        (drawn / f"copy{ending}").write_bytes(copied.with_suffix(ending).read_bytes())
    assert len(planned(asked(validation={"fraction": 0.1})).held_out.rows) == 2, "a copy is on its image's side"


def test_of_many_an_image_keeps_its_side_when_others_come():
    def side(numbers):
        hashes = [sha256(str(number).encode()).hexdigest() for number in numbers]
        rows = [SimpleNamespace(set=SimpleNamespace(validation=False), item=SimpleNamespace(sha256=h)) for h in hashes]
        return {row.item.sha256 for row in split(Samples((), tuple(rows)), 0.1)[1].rows}

    fewer, more = side(range(1000)), side(range(1500))
    assert fewer < more
    assert 60 < len(fewer) < 140


def test_a_run_of_an_earlier_version_continues_with_what_it_held_out(asked, tmp_path, monkeypatch):
    """That chose by each hash alone: an image below the fraction."""

    def earlier(hashes, fraction):
        return frozenset(one for one in hashes if int(one[:13], 16) / 16**13 <= fraction)

    source = asked(validation={"fraction": 0.4}, train={"steps": 4})
    monkeypatch.setattr(samples, "_chosen", earlier)
    by_hash = held(source)
    train(source, ["train.steps=2"], "cpu", False)
    monkeypatch.undo()
    assert held(asked("other", validation={"fraction": 0.4})) != by_hash
    assert held(source) == by_hash
    train(source, [], "cpu", False)
    assert [line["step"] for line in log_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert held(asked(validation={"fraction": 0.25})) != by_hash


def test_without_a_fraction_or_sets_nothing_is(asked, tmp_path):
    assert planned(asked(validation={"fraction": 0.0})).held_out.rows == ()
    train(asked(validation={"fraction": 0.0}, train={"steps": 2}), [], "cpu", False)
    assert all("validation" not in line for line in log_of(tmp_path / "run"))


def test_one_image_is_held_out_of_few_and_some_must_be_left(asked, drawn):
    for path in sorted(drawn.rglob("*"))[4:]:
        path.unlink()
    assert len(planned(asked(validation={"fraction": 1e-6})).held_out.rows) == 1
    with pytest.raises(ConfigError, match=r"validation\.fraction: expected images left to train on"):
        planned(asked(validation={"fraction": 0.999999}))


def test_a_set_is_held_out_whole_and_an_image_that_is_trained_on_refused(asked, drawn, tmp_path):
    write_images(tmp_path / "unseen", 4, 99, scenes)
    sets = [{"path": str(drawn)}, {"path": str(tmp_path / "unseen"), "validation": True}]
    source = asked(data={"sets": sets, "path": ""}, validation={"fraction": 0.0})
    plan = planned(source)
    assert (len(plan.samples.rows), len(plan.held_out.rows)) == (12, 4)
    copied = next(drawn.rglob("*.png"))
    (tmp_path / "unseen" / "copy.png").write_bytes(copied.read_bytes())
    (tmp_path / "unseen" / "copy.txt").write_text("a copy")
    with pytest.raises(DataError, match=r"1 validation image is also trained on") as told:
        planned(source)
    assert "copy.png" in str(told.value)
    assert copied.name in str(told.value)


def test_a_set_for_validation_alone_leaves_nothing_to_train_on():
    held = Samples((DataSet(path="held", validation=True),), ())
    with pytest.raises(ConfigError, match="expected a set to train on"):
        split(held, 0.0)


# ---- the measurement ---------------------------------------------------------------------------------------


@pytest.mark.bytes
@pytest.mark.usefixtures("trained_base")
def test_the_loss_before_training_is_the_same_whatever_the_run(asked):
    """Another seed, batch size, loss, weighting, noise and timestep sampling: the values compare."""

    def measured(**changed):
        plan = planned(asked(**changed))
        stop = StopRequest()
        keys = plan.encoding.keys(plan.everything, ())
        encoded = encode(plan, keys, Session("cpu", stop=stop))
        _, _, state = load_networks(plan, Session("cpu"))
        offset = len(plan.samples.rows)
        rows = plan.held_out.rows
        images = HeldOut(
            tuple(row.item.sha256 for row in rows),
            tuple(row.placement.bucket for row in rows),
            lambda i: encoded.example(offset + i),
        )
        return make_validator(plan, state, images, Session("cpu")).measure()

    usual = measured()
    other = measured(
        train={"seed": 7},
        loss={"kind": "huber", "weighting": "min_snr", "offset_noise": 0.1, "min_timestep": 500},
    )
    assert (usual.loss, usual.bands) == (other.loss, other.bands)
    assert measured(data={"batch_size": 3}).loss == pytest.approx(usual.loss, rel=1e-5)
    assert list(usual.bands) == ["0-333", "333-667", "667-1000"]
    assert usual.bands["0-333"] > usual.bands["667-1000"]  # of noise prediction: little noise is harder to tell


# ---- in a run ----------------------------------------------------------------------------------------------


@pytest.mark.bytes
def test_neither_validation_nor_losses_of_images_change_a_trained_bit(asked, tmp_path):
    more = {"lora": {"dropout": 0.3}, "train": {"steps": 4, "ema_decay": 0.5}, "data": {"caption_dropout": 0.3}}
    train(asked("with", **more, log={"images_every": 1}), [], "cpu", False)
    without = {"validation": {"every": 0}, "log": {"images_every": 0}}
    train(asked("without", **more, **without), [], "cpu", False)
    assert (tmp_path / "with" / "lora.safetensors").read_bytes() == (
        tmp_path / "without" / "lora.safetensors"
    ).read_bytes()
    step = "checkpoints/step-000004/optimizer.safetensors"
    assert (tmp_path / "with" / step).read_bytes() == (tmp_path / "without" / step).read_bytes()
    for one, other in zip(log_of(tmp_path / "with"), log_of(tmp_path / "without"), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert not (tmp_path / "without" / "images.json").exists()


def test_the_log_has_loss_bands_best_and_cost(asked, tmp_path):
    train(asked(output={"tensorboard": True}), [], "cpu", False)
    told = {line["step"]: line["validation"] for line in log_of(tmp_path / "run") if "validation" in line}
    assert list(told) == [2, 4, 6]
    for found in told.values():
        assert found["loss"] == pytest.approx(np.mean(list(found["bands"].values())))
        assert found["seconds"] > 0
    best = min(told, key=lambda step: (told[step]["loss"], step))
    assert told[6]["best"] == {"step": best, "loss": told[best]["loss"]}
    events = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"validation/loss" in events
    assert b"validation/0-333" in events
    held = [row for row in json.loads((tmp_path / "run" / "dataset.json").read_text()) if row.get("validation")]
    assert len(held) == len(planned(asked()).held_out.rows)


@pytest.mark.bytes
def test_a_run_that_is_continued_stands_as_one_that_was_not(asked, tmp_path):
    """Validations, the losses of images, and what is trained, by checkpoints' bytes and the log."""
    train(asked("whole", log={"images_every": 1}), [], "cpu", False)
    parts = asked("parts", log={"images_every": 1})
    for steps in (3, 5, 6):
        train(parts, [f"train.steps={steps}"], "cpu", False)
    for name in ("optimizer.safetensors", "state.json", "images.json"):
        files = [tmp_path / run / "checkpoints" / "step-000006" / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert (tmp_path / "whole" / "images.json").read_bytes() == (tmp_path / "parts" / "images.json").read_bytes()
    for one, other in zip(log_of(tmp_path / "whole"), log_of(tmp_path / "parts"), strict=True):
        assert one["loss"] == other["loss"]
        if "validation" in one:
            assert timeless(one["validation"]) == timeless(other["validation"])
        assert one["images"]["highest"] == other["images"]["highest"]


@pytest.mark.usefixtures("trained_base")
def test_the_best_checkpoint_outlives_newer_ones_and_patience_ends_the_run(asked, tmp_path, capfd):
    """At a rate that makes everything worse, the first validation stays the best."""
    worse = asked(
        optimizer={"lr": 0.5}, train={"steps": 40}, checkpoint={"every": 1, "keep": 1}, validation={"patience": 3}
    )
    told = train(worse, [], "cpu", False)
    assert told["steps"] == 8
    assert told["best"]["step"] == 2
    run = tmp_path / "run"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000008"]
    of_it = (run / "checkpoints" / "step-000002" / "lora.safetensors").read_bytes()
    assert told["best"]["lora"] == str(run / "lora.best.safetensors")
    assert Path(told["best"]["lora"]).read_bytes() == of_it
    assert same(run / "lora.safetensors", run / "checkpoints" / "step-000008" / "lora.safetensors")
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    before = (run / "lora.safetensors").read_bytes()
    (run / "lora.safetensors").unlink()
    (run / "lora.best.safetensors").unlink()  # as a kill would leave it that comes before it is written
    assert train(worse, [], "cpu", False)["steps"] == 8  # it has ended; what is lacking is written again
    assert (run / "lora.best.safetensors").read_bytes() == of_it
    assert (run / "lora.safetensors").read_bytes() == before
    assert train(worse, ["validation.patience=4"], "cpu", False)["steps"] == 10


def test_a_loss_of_other_levels_or_images_is_not_compared(asked, tmp_path, caplog):
    """Patience would end the run by a loss of another measure; the bits that are trained are the same."""
    config, run = asked(), tmp_path / "run"
    assert train(config, ["train.steps=2"], "cpu", False)["best"]["step"] == 2
    state = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())
    state["validation"]["loss"] = 1e-9
    rewrite_state(run / "checkpoints" / "step-000002", json.dumps(state))
    for timesteps, best in ((3, 2), (4, 4)):
        caplog.clear()
        told = train(config, ["train.steps=4", f"validation.timesteps={timesteps}"], "cpu", False)
        assert told["best"]["step"] == best
        assert caplog.text.count("the lowest is counted anew") == (best == 4)
        lose_end(run)


def test_the_best_checkpoint_stays_where_a_run_goes_on_without_validations(asked, tmp_path):
    config = asked(checkpoint={"every": 1, "keep": 1})
    assert train(config, ["train.steps=2"], "cpu", False)["best"]["step"] == 2
    told = train(config, ["train.steps=4", "validation.every=0"], "cpu", False)
    assert told["best"]["step"] == 2
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"step-000002", "step-000004"}


def test_the_command_ends_with_0_and_says_why(asked, tmp_path, capsys, small_base, drawn):
    options = {
        "model.checkpoint": small_base,
        "data.path": drawn,
        "output.dir": tmp_path / "run",
        "data.resolution": 96,
        "data.bucket_step": 32,
        "lora.rank": 1,
        "optimizer.lr": 0.5,
        "train.steps": 20,
        "train.precision": "fp32",
        "validation.fraction": 0.3,
        "validation.every": 1,
        "validation.patience": 1,
        "sample.every": 0,
    }
    config = tmp_path / "a.toml"
    config.write_text("format = 1\n")
    line = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
    assert cli.run(["train", "--config", str(config), "--device", "cpu", *line]) == 0
    assert "best" in capsys.readouterr().out


def test_epochs_and_steps_contradict_and_a_dry_run_counts_what_is_held_out(asked):
    with pytest.raises(ConfigError, match=r"validation\.every_epochs: expected this or validation\.every \(2\)"):
        planned(asked(validation={"every_epochs": 1}))
    said = train(asked(), [], "cpu", dry_run=True)
    assert said["validation_images"] == len(planned(asked()).held_out.rows)
    assert said["images"] + said["validation_images"] == 12


def test_the_predicted_memory_has_the_validation(asked):
    """It takes no more than the step does, whose memory it uses; what it adds are its buffers."""
    with_it, without = (predicted_memory(planned(asked(validation={"every": every})), H100) for every in (2, 0))
    assert without.training <= with_it.training <= 1.02 * without.training + (1 << 20)


def test_the_standing_counts_from_the_best():
    standing = EarlyStopping()
    for step, loss in enumerate([3.0, 2.0, 2.0, float("nan"), 1.5], 1):
        standing = standing.after(step, loss)
        if step == 4:
            assert standing == EarlyStopping(2.0, 2, 2)
    assert standing == EarlyStopping(1.5, 5, 0)
    assert EarlyStopping().after(1, float("nan")).after(2, 9.0) == EarlyStopping(9.0, 2, 0)
    assert EarlyStopping.read({"loss": 1.5, "step": 5, "since": 0}) == standing
    assert EarlyStopping.read(None) == EarlyStopping.read({"other": 1}) == EarlyStopping()
