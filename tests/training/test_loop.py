"""The loop by itself, around a network of one layer: what happens at which step, and what is told of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.lora import attach
from flame_train.config import schema
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor, nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.errors import DeviceFault, Interrupted, NonFiniteError
from flame_train.io.lora_names import LoraComponent, LoraFamily
from flame_train.io.runfolder import RunFolder
from flame_train.io.safetensors import SafetensorsFile
from flame_train.training import loop
from flame_train.training.batch import HostBatch
from flame_train.training.family import Denoiser
from flame_train.training.optimizer import build_optimizer
from flame_train.training.result import Sources, restore
from flame_train.training.step import FIGURES, State
from flame_train.training.stop import StopRequest

NAMES = LoraFamily("toy", (LoraComponent("unet", "lora_unet", {"proj": "proj"}),), "toy", "toy/lora", "toy", "8x8")


class Toy(nn.Module):
    """One layer over the channels."""

    def __init__(self) -> None:
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


@dataclass
class Feed:
    """A loader of numbered samples: sample s of the run is always the same, however it is batched."""

    batch: int
    accumulation: int = 1
    shapes: tuple[tuple[int, int], ...] = ((2, 2),)
    next: int = 0
    wait_ms: float = 0.0
    events: list[Any] = field(default_factory=list)
    poison: int = -1
    on_take: Callable[[int], None] = lambda micro: None

    def take(self) -> HostBatch:
        micro, self.next = self.next, self.next + 1
        self.events.append(f"take {micro}")
        self.on_take(micro)
        self.wait_ms = micro + 0.5
        step, within = divmod(micro, self.accumulation)
        h, w = self.shapes[micro % len(self.shapes)]
        places = range(within * self.batch, (within + 1) * self.batch)
        arrays = [self._sample(step * self.accumulation * self.batch + s, h, w) for s in places]
        mean = np.stack(arrays)
        if micro == self.poison:
            mean[0] = np.nan
        moments = {"mean": mean, "logvar": np.full_like(mean, -3.0)}
        return HostBatch(moments, step, np.array(places), tuple(f"{micro}-{s}.png" for s in places))

    @staticmethod
    def _sample(number: int, h: int, w: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(number).standard_normal((h, w, 4)).astype(np.float32)

    def epoch(self, micro: int) -> float:
        return micro / 4


def sections(**changes: dict[str, Any]) -> schema.Config:
    given: dict[str, dict[str, Any]] = {
        "train": {"steps": 8, "precision": "fp32"},
        "lora": {"rank": 2, "alpha": 2.0},
        "optimizer": {"lr": 0.05},
        "checkpoint": {"every": 0},
        "sample": {"every": 0},
    }
    merged = {name: given.get(name, {}) | changes.get(name, {}) for name in {**given, **changes}}
    return schema.Config(**{n: schema.Config.model_fields[n].annotation(**keys) for n, keys in merged.items()})


@pytest.fixture
def trained(tmp_path):
    """trained(feed, **sections): runs, or continues, a training in a folder; returns the run and its log."""

    def train(
        feed: Feed, *, preview: Callable[[int], None] = lambda step: None, stop: StopRequest | None = None,
        name: str = "run", before: Callable[[RunFolder], None] = lambda folder: None, **changes: dict[str, Any],
    ) -> tuple[loop.Run, list[dict[str, Any]]]:  # fmt: skip
        config = sections(**changes)
        model = Toy()
        model.init(np.random.default_rng(3))
        attached = attach(model, ["proj"], rank=config.lora.rank, alpha=config.lora.alpha, seed=1)
        backend = get_backend("cpu")
        denoiser = Denoiser(model, "unet", lambda x, t, c: model(x), lambda m, noise: m[0] + (m[1] * 0.5).exp() * noise)
        state = State(
            denoiser.denoise, denoiser.sample_latents, Objective(NoiseSchedule.scaled_linear()),
            build_optimizer(attached.parameters(), config, backend), as_dtype("fp32"), 5,
            Tensor(np.zeros((), np.float32)), np.zeros(len(FIGURES)),
        )  # fmt: skip
        with RunFolder(tmp_path / name, "", lambda old, found: None) as folder:
            found = folder.resume()
            first = restore(found, state.optimizer) if found else 0
            feed.next = first * feed.accumulation
            before(folder)
            run = loop.Run(
                config, "cpu", folder, denoiser, attached, NAMES, state, feed, Sources("", "", "", "data"), first,
                preview, stop or StopRequest(),
            )  # fmt: skip
            loop.train(run)
        return run, log_of(tmp_path / name)

    return train


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").iterdir())


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
        loop.Batch, "fill",
        lambda self, host: (filled(self, host), addresses.append(self.latents()[0].data.ctypes.data))[0],
    )  # fmt: skip
    trained(Feed(2, shapes=((2, 2), (2, 4), (4, 2))))
    assert [len(calls) for calls in captured] == [8, 3, 3, 2]  # the update, then each shape as it comes
    assert addresses == [addresses[i % 3] for i in range(8)]
    assert len(set(addresses)) == 3


def test_figures_are_read_one_step_late_and_all_are_there(trained):
    """Step n is told after step n + 1 was launched, except before something that must know of it."""
    feed = Feed(1)

    def watch(folder: RunFolder) -> None:
        log, checkpoint = folder.log, folder.checkpoint
        folder.log = lambda record: (feed.events.append(f"log {record['step']}"), log(record))
        folder.checkpoint = lambda step, *rest: (feed.events.append(f"save {step}"), checkpoint(step, *rest))

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
    trained(Feed(1), preview=drawn.append, sample={"every": 3})
    assert drawn == [0, 3, 6]


def test_grids_and_result_show_the_moving_average(trained, tmp_path, monkeypatch):
    """Beside one made from the weights of a run that has none."""
    runs, seen, train = [], {}, loop.train
    monkeypatch.setattr(loop, "train", lambda run: runs.append(run) or train(run))

    def look(step: int) -> None:
        seen[step] = runs[-1].attached.adapters["proj"].up.numpy().copy()

    trained(Feed(1), name="plain", preview=look, sample={"every": 1})
    weights, mean = dict(seen), 0.0
    trained(Feed(1), name="calm", preview=look, sample={"every": 1}, train={"ema_decay": 0.3})
    for step in range(1, 9):
        decay = min(0.3, step / (9 + step)) if step > 1 else 0.0
        mean = decay * mean + (1 - decay) * weights[step]
        np.testing.assert_allclose(seen[step], mean, rtol=1e-5, atol=1e-7)
    assert np.abs(mean - weights[8]).max() > 1e-3
    for folder, expected in (("plain", weights[8]), ("calm", seen[8])):
        with SafetensorsFile(tmp_path / folder / "lora.safetensors") as file:
            np.testing.assert_array_equal(file.read("lora_unet_proj.lora_up.weight"), expected)


@pytest.mark.parametrize("exists", [True, False])
def test_a_grid_that_the_last_run_did_not_come_to_is_drawn_first(trained, exists):
    """It was stopped between the checkpoint of step 4 and the grid of step 4."""
    trained(Feed(1), train={"steps": 4, "precision": "fp32"})
    drawn: list[int] = []

    def put(folder: RunFolder) -> None:
        folder.samples.mkdir(exist_ok=True)
        if exists:
            folder.sample(4).write_bytes(b"a picture")

    run, _ = trained(Feed(1), preview=drawn.append, before=put, sample={"every": 4, "prompts": ("a disc",)})
    assert run.first == 4
    assert drawn == ([8] if exists else [4, 8])


def test_a_request_before_the_first_step_is_heeded(trained, tmp_path):
    stop = StopRequest()
    stop.signal_number = 15
    feed = Feed(1)
    with pytest.raises(Interrupted, match="stopped by SIGTERM before the next step"):
        trained(feed, stop=stop)
    assert feed.events == []
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("during", ["take", "grid"])
def test_a_request_saves_the_step_that_is_being_made(trained, tmp_path, during):
    stop = StopRequest()

    def ask(number: int, wanted: str) -> None:
        if (during, number) == (wanted, 4):
            stop.signal_number = 2

    feed = Feed(1, on_take=lambda micro: ask(micro + 1, "take"))
    with pytest.raises(Interrupted, match="stopped by SIGINT after step 4, which is saved in"):
        trained(feed, stop=stop, preview=lambda step: ask(step, "grid"), sample={"every": 2})
    assert steps_of(tmp_path / "run") == [4]
    assert [r["step"] for r in log_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "lora.safetensors").exists()


def last_step_asks(stop: StopRequest) -> Feed:
    def ask(micro: int) -> None:
        stop.signal_number = 15 if micro == 7 else 0

    return Feed(1, on_take=ask)


@pytest.mark.parametrize("sample", [{"every": 3, "prompts": ("a disc",)}, {"every": 4}], ids=["none due", "no prompts"])
def test_a_request_in_the_last_step_comes_too_late(trained, tmp_path, sample):
    """There is nothing left to stop: the run is done, to the last byte."""
    stop = StopRequest()
    trained(last_step_asks(stop), stop=stop, sample=sample)
    trained(Feed(1), name="undisturbed", sample=sample)
    assert stop.requested
    assert steps_of(tmp_path / "run") == [8]
    result, expected = ((tmp_path / name / "lora.safetensors").read_bytes() for name in ("run", "undisturbed"))
    assert result == expected


def test_a_request_in_the_last_step_leaves_its_grid_for_the_next_run(trained, tmp_path):
    stop, drawn = StopRequest(), []
    sample = {"every": 4, "prompts": ("a disc",)}
    with pytest.raises(Interrupted, match="stopped by SIGTERM after step 8"):
        trained(last_step_asks(stop), stop=stop, sample=sample, preview=drawn.append)
    assert drawn == [0, 4]
    assert (tmp_path / "run" / "lora.safetensors").exists()
    trained(Feed(1), sample=sample, preview=drawn.append)
    assert drawn == [0, 4, 8]


def test_a_request_to_a_run_that_is_done_changes_nothing(trained):
    trained(Feed(1))
    stop = StopRequest()
    stop.signal_number = 15
    run, _ = trained(Feed(1), stop=stop)
    assert run.first == 8


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
            Feed(2, poison=5), before=lambda folder: runs.append(folder), checkpoint={"every": 5},
            schedule={"name": "constant"},
        )  # fmt: skip
    assert "5-0.png, 5-1.png" in str(caught.value)
    assert [r["step"] for r in log_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "run") == [5]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 5)
    kept = tmp_path / "run" / "checkpoints" / "step-000005" / "optimizer.safetensors"
    good = tmp_path / "good" / "checkpoints" / "step-000005" / "optimizer.safetensors"
    assert kept.read_bytes() == good.read_bytes()
    assert before.state.optimizer.arena.values.any()


@pytest.mark.parametrize("error", [OSError("full"), MemoryError(), ValueError("shape"), KeyError("x")])
def test_a_grid_that_fails_costs_a_warning(error, caplog):
    def fail(step: int) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        loop.forgiving(fail)(7)
    assert "no sample grid at step 7" in caplog.text
    assert type(error).__name__ in caplog.text


def test_a_grid_that_is_cut_short_by_a_request_is_no_failure(caplog):
    stop = StopRequest()
    stop.signal_number = 2
    loop.forgiving(lambda step: stop.check("while sampling"))(7)
    assert caplog.text == ""


@pytest.mark.parametrize("error", [DeviceFault("lost"), KeyboardInterrupt()])
def test_what_a_grid_does_not_survive(error):
    def fail(step: int) -> None:
        raise error

    with pytest.raises(type(error)):
        loop.forgiving(fail)(7)


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


def test_a_grid_that_cannot_be_looked_at_is_one_that_lacks():
    """A name that is too long stands for a folder that may not be entered: the grid is tried, and costs a warning."""
    config = schema.Config(sample=schema.SampleSection(every=250, prompts=("a disc",)))
    run = SimpleNamespace(config=config, folder=SimpleNamespace(sample=lambda step: Path("a" * 300)))
    assert loop._lacks_grid(run, 250)
