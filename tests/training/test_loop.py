"""The loop by itself, around a network of one layer: what happens at which step, and what is told of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flame_train.engine import nn
from flame_train.errors import Interrupted, NonFiniteError
from flame_train.io.runfolder import RunFolder
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.training import loop
from flame_train.training.gradient_norms import block_names
from flame_train.training.session import Callbacks, StopRequest
from tests.run_files import log_of
from tests.training.toy import Feed, steps_of

pytestmark = pytest.mark.bytes


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_the_larger_batch(trained, batch, accumulation):
    """The same eight samples an update with the same noise: equal but for the order of fp32 sums."""
    whole, log = trained(Feed(8), name="whole")
    parts, found = trained(
        Feed(batch, accumulation), name="parts", data={"batch_size": batch}, gradient={"accumulation": accumulation}
    )
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in log], rtol=1e-5)
    np.testing.assert_allclose([r["grad_norm"] for r in found], [r["grad_norm"] for r in log], rtol=1e-4)
    for name, value in whole.state.optimizer.arena.state().items():
        other = parts.state.optimizer.arena.state()[name]
        np.testing.assert_allclose(other, value, rtol=1e-4, atol=1e-6)
    assert whole.state.optimizer.arena.values.any()


def test_the_loss_falls(trained):
    """On one sample with a fixed place in the run the layer learns what it can."""
    _, log = trained(Feed(8), train={"steps": 60, "precision": "fp32"})
    losses = [r["loss"] for r in log]
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])


def test_each_shape_is_captured_once_with_buffers_that_stay(trained, monkeypatch):
    captured, addresses = [], []

    def capture(fn, device):
        calls = []
        captured.append(calls)
        assert device == "cpu"
        return lambda: (calls.append(1), fn())[1]

    filled = loop.Batch.fill
    monkeypatch.setattr(loop, "capture", capture)
    monkeypatch.setattr(
        loop.Batch,
        "fill",
        lambda self, host: (filled(self, host), addresses.append(self.latents()[0].data.ctypes.data))[0],
    )
    trained(Feed(2, shapes=((2, 2), (2, 4), (4, 2))))
    assert [len(calls) for calls in captured] == [8, 0, 3, 3, 2]  # the update, the sum over processes, each shape
    assert addresses == [addresses[i % 3] for i in range(8)]
    assert len(set(addresses)) == 3


def test_figures_are_read_one_step_late_and_all_are_there(trained):
    """Step n is told after step n + 1 was launched, except before something that must know of it."""
    feed = Feed(1)

    def watch(folder: RunFolder) -> None:
        log, checkpoint = folder.log, folder.checkpoint
        folder.log = lambda record, live: (feed.events.append(f"log {record['step']}"), log(record, live))
        folder.checkpoint = lambda step, *rest, **more: (
            feed.events.append(f"save {step}"),
            checkpoint(step, *rest, **more),
        )

    _, log = trained(feed, before=watch, train={"steps": 5, "precision": "fp32"}, checkpoint={"every": 3})
    assert feed.events == [
        "take 0",
        *("take 1", "log 1", "take 2", "log 2", "log 3", "save 3"),
        *("take 3", "take 4", "log 4", "log 5", "save 5"),
    ]
    assert [r["step"] for r in log] == [1, 2, 3, 4, 5]
    assert [r["epoch"] for r in log] == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_rates_and_waits(trained, monkeypatch):
    """Two images every second, whether a step is told late or at once; waits add up over the micro-batches."""
    clock = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: clock[0])

    monkeypatch.setattr(loop, "time", Clock)

    def tick(micro: int) -> None:
        clock[0] += 0.5

    feed = Feed(1, 2, on_take=tick)
    _, log = trained(feed, gradient={"accumulation": 2}, checkpoint={"every": 3})
    assert [r["images_per_s"] for r in log] == [2.0] * 8
    assert [r["data_wait_ms"] for r in log] == [4.0 * n + 2.0 for n in range(8)]


@pytest.mark.parametrize(
    ("every", "keep", "left"), [(3, 9, [3, 6, 8]), (0, 9, [8]), (2, 2, [6, 8]), (1, 1, [8]), (50, 3, [8])]
)
def test_when_checkpoints_are_made_and_how_many_stay(trained, tmp_path, every, keep, left):
    trained(Feed(1), checkpoint={"every": every, "keep": keep})
    assert steps_of(tmp_path / "run") == left
    assert (tmp_path / "run" / "lora.safetensors").exists()


def test_when_grids_are_drawn(trained):
    drawn: list[int] = []
    trained(Feed(1), sample_images=drawn.append, sample={"every": 3})
    assert drawn == [0, 3, 6]


def test_grids_and_result_show_the_moving_average(trained, tmp_path, monkeypatch):
    """Beside one made from the weights of a run that has none."""
    runs, seen, train = [], {}, loop.train
    monkeypatch.setattr(loop, "train", lambda run: runs.append(run) or train(run))

    def look(step: int) -> None:
        seen[step] = runs[-1].lora.attached.adapters["proj"].up.numpy().copy()

    trained(Feed(1), name="plain", sample_images=look, sample={"every": 1})
    weights, mean = dict(seen), 0.0
    trained(Feed(1), name="calm", sample_images=look, sample={"every": 1}, train={"ema_decay": 0.3})
    for step in range(1, 9):
        decay = min(0.3, step / (9 + step)) if step > 1 else 0.0
        mean = decay * mean + (1 - decay) * weights[step]
        np.testing.assert_allclose(seen[step], mean, rtol=1e-5, atol=1e-7)
    assert np.abs(mean - weights[8]).max() > 1e-3
    for folder, expected in (("plain", weights[8]), ("calm", seen[8])):
        with SafetensorsFile(tmp_path / folder / "lora.safetensors") as file:
            np.testing.assert_array_equal(file.read("lora_unet_proj.lora_up.weight"), expected)


def test_continued_is_as_if_never_stopped(trained, tmp_path):
    whole, log = trained(Feed(2), name="whole")
    stop = StopRequest()

    def ask(micro: int) -> None:
        stop.signal_number = 2 if micro == 4 else 0

    with pytest.raises(Interrupted):
        trained(Feed(2, on_take=ask), stop=stop)
    parts, found = trained(Feed(2))
    assert parts.first == 5
    assert [r["loss"] for r in found] == [r["loss"] for r in log]
    np.testing.assert_array_equal(parts.state.optimizer.arena.values, whole.state.optimizer.arena.values)
    for name in ("whole", "run"):
        assert (tmp_path / name / "lora.safetensors").exists()


def test_a_loss_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(trained, tmp_path):
    before, _ = trained(Feed(2), name="good", train={"steps": 5, "precision": "fp32"}, schedule={"name": "constant"})
    runs: list[Any] = []
    with pytest.raises(NonFiniteError, match="the loss of step 6") as caught:
        trained(
            Feed(2, poison=5),
            before=lambda folder: runs.append(folder),
            checkpoint={"every": 5},
            schedule={"name": "constant"},
        )
    assert "5-0.png, 5-1.png" in str(caught.value)
    assert [r["step"] for r in log_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "run") == [5]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 5)
    kept = tmp_path / "run" / "checkpoints" / "step-000005" / "optimizer.safetensors"
    good = tmp_path / "good" / "checkpoints" / "step-000005" / "optimizer.safetensors"
    assert kept.read_bytes() == good.read_bytes()
    assert before.state.optimizer.arena.values.any()


def test_the_result_is_made_again_when_all_steps_are_done(trained, tmp_path):
    trained(Feed(1))
    path = tmp_path / "run" / "lora.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"something else")
    feed = Feed(1)
    run, log = trained(feed)
    assert feed.events == []
    assert path.read_bytes() == whole
    assert len(log) == 8
    assert run.first == 8


def test_the_blocks_of_a_network_are_those_that_can_be_checkpointed():
    """And what has none, such as the toy, is named by the parts of its layers."""
    assert block_names(Flux(FluxArch.tiny())) == [f"{kind}_blocks.{i}" for kind in ("double", "single") for i in (0, 1)]
    assert block_names(nn.Linear(2, 2)) == []


def test_the_log_has_the_gradient_norm_of_each_block_where_it_is_due(trained):
    """The toy's one layer is one block, so its norm is the whole gradient's, which the optimizer measures itself."""
    _, log = trained(Feed(2, 2), log={"gradients_every": 3}, gradient={"accumulation": 2})
    assert [record["step"] for record in log if "gradients" in record] == [3, 6]
    for record in log[2:6:3]:
        assert record["gradients"] == {"proj": pytest.approx(record["grad_norm"], rel=1e-6)}


def test_gradient_norms_and_callbacks_change_no_bit(trained):
    told = []
    callbacks = Callbacks(
        lambda record: told.append(record["step"]),
        lambda step, folder: told.append(f"saved {step} {(folder / 'MANIFEST.json').exists()}"),
    )
    watched, _ = trained(
        Feed(4), name="watched", callbacks=callbacks, log={"gradients_every": 1}, checkpoint={"every": 4}
    )
    plain, _ = trained(Feed(4), name="plain", checkpoint={"every": 4})
    assert watched.state.optimizer.arena.values.tobytes() == plain.state.optimizer.arena.values.tobytes()
    assert told == [1, 2, 3, 4, "saved 4 True", 5, 6, 7, 8, "saved 8 True"]


def test_a_callback_cannot_change_a_record_and_what_it_raises_ends_the_run(trained):
    def meddle(record):
        record["loss"] = 0.0

    with pytest.raises(TypeError, match="does not support item assignment"):
        trained(Feed(4), callbacks=Callbacks(on_step=meddle))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"on_step": lambda step, loss: None}, "on_step: expected a function of 1: the step's record, a mapping; "),
        ({"on_checkpoint": lambda step: None}, "on_checkpoint: expected a function of 2: the step, the checkpoint's"),
        ({"on_sample": lambda: None}, "on_sample: expected a function of 2: the step, the sample grid's file; "),
        ({"on_step": 5}, "on_step: expected a function .*; got int"),
    ],
)
def test_a_callback_with_other_arguments_is_refused(given, told):
    with pytest.raises(TypeError, match=told):
        Callbacks(**given)
    Callbacks(on_step=print, on_checkpoint=lambda *both: None, on_sample=dict)
