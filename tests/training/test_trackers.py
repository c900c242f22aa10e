"""Trackers: what TensorBoard and Weights & Biases get of a run, read back from their own files."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from flame_train.data.clip_files import times, webp
from flame_train.data.grid import grid, write_png
from flame_train.training.trackers import TensorBoard, Tracker, Trackers, WeightsAndBiases, curves, images_of


def record(step: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    usual = {"lr": 1e-3, "grad_norm": 0.5, "loss_scale": 1.0, "images_per_s": 2.0, "memory": 3 * 2**29}
    return {"step": step, "loss": loss, **usual, **more}


def board(folder: Path, done: int, config: str = "") -> Trackers:
    return Trackers({TensorBoard: lambda: TensorBoard(folder, done, config)})


def events(folder: Path) -> list[Any]:
    """What the event files in `folder` say: each record is a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("Q", raw[:8])
            found.append(Event.FromString(raw[12 : 12 + length]))
            raw = raw[16 + length :]
    return found


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Path, list[np.ndarray[Any, Any]]]:
    """A grid of three images, and the images."""
    images = [np.full((16, 24, 3), 40 * i + 20, np.uint8) for i in range(3)]
    path = tmp_path / "step-000008.png"
    write_png(path, grid(images))
    return path, images


def test_the_memory_and_validations_are_curves_of_their_own() -> None:
    bands = {"0-250": 0.5}
    found = curves(record(1, validation={"loss": 0.75, "bands": bands}, gradients={"input_blocks.0": 2.0}))
    assert found["memory_gib"] == 1.5
    assert (found["validation/loss"], found["validation/0-250"], found["gradients/input_blocks.0"]) == (0.75, 0.5, 2.0)
    assert "memory_gib" not in curves(record(1, memory=None))


def test_tensorboard_has_a_point_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with board(tmp_path / "board", 6) as trackers:
        for step in (7, 8):
            trackers.write(record(step, loss=step / 2))
    version, begin, *points = events(tmp_path / "board")
    assert version.file_version == "brain.Event:2"
    assert (begin.step, begin.session_log.status) == (7, begin.session_log.START)
    assert [(p.step, {v.tag: v.simple_value for v in p.summary.value}["loss"]) for p in points] == [(7, 3.5), (8, 4.0)]


def test_tensorboard_has_the_images_and_the_config(tmp_path: Path, samples: Any) -> None:
    pytest.importorskip("tensorboardX")
    file, images = samples
    prompts = ["a cat", "a dog", "a cat"]
    with board(tmp_path / "board", 0, '[train]\nsteps = 8 # <b>"many"</b>\n') as trackers:
        trackers.show(8, file, prompts)
    *_, text, shown = events(tmp_path / "board")
    (config,) = text.summary.value
    assert (config.tag, config.metadata.plugin_data.plugin_name) == ("config/text_summary", "text")
    assert config.tensor.string_val[0].decode() == '    [train]\n    steps = 8 # <b>"many"</b>'
    assert shown.step == 8
    assert [v.tag for v in shown.summary.value] == ["samples/01 a cat", "samples/02 a dog", "samples/03 a cat"]
    for value, image in zip(shown.summary.value, images, strict=True):
        raw = value.image.encoded_image_string
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(raw))), image)
        assert (value.image.height, value.image.width) == image.shape[:2]


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A grid of two clips of five frames, which become brighter."""
    frames = np.stack([np.full((16, 24, 3), 40 * i + 20, np.uint8) for i in range(5)])
    path = tmp_path / "step-000008.webp"
    path.write_bytes(webp(grid([frames, frames[::-1]]), times(5, 20)))
    return path


def test_tensorboard_plays_clips(tmp_path: Path, clips: Path) -> None:
    pytest.importorskip("tensorboardX")
    with board(tmp_path / "board", 0) as trackers:
        trackers.show(8, clips, ["a cat", "a dog"])
    *_, shown = events(tmp_path / "board")
    assert [v.tag for v in shown.summary.value] == ["samples/01 a cat", "samples/02 a dog"]
    for value, order in zip(shown.summary.value, (1, -1), strict=True):
        with Image.open(io.BytesIO(value.image.encoded_image_string)) as image:
            frames = [(frame.info["duration"], np.asarray(frame.convert("L")).mean()) for frame in _frames(image)]
        assert (value.image.height, value.image.width) == (16, 24)
        assert [time for time, _ in frames] == [50] * 5
        np.testing.assert_allclose([light for _, light in frames][::order], [20, 60, 100, 140, 180], atol=4)


def _frames(image: Image.Image) -> Iterator[Image.Image]:
    yield from ImageSequence.Iterator(image)


def test_a_grid_of_images_of_several_sizes_is_shown_whole(tmp_path: Path, samples: Any) -> None:
    file, _ = samples
    (raw,) = images_of(file, ["a", "b", "c", "d", "e", "f", "g"]).values()
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(raw))), np.asarray(Image.open(file)))


def test_a_grid_that_was_not_written_is_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with board(tmp_path / "board", 0) as trackers:
        trackers.show(1, tmp_path / "none.png", ["a cat"])
    assert caplog.messages == []


def test_a_disk_that_is_full_costs_the_board_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboardX")
    with caplog.at_level(logging.WARNING), board(tmp_path / "board", 0) as trackers:
        (file,) = (tmp_path / "board").iterdir()
        (number,) = (int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(file))
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, number)
        os.close(full)
        for step in range(1, 100):
            trackers.write(record(step))
    assert [message for message in caplog.messages if "TensorBoard" in message] == [
        "TensorBoard events are no longer written: [Errno 28] No space left on device"
    ]


def test_a_board_of_a_library_that_does_not_work_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")

    def fail(*arguments: object) -> None:
        raise TypeError("Descriptors cannot be created directly.")

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.__init__", fail)
    with caplog.at_level(logging.WARNING), board(tmp_path / "board", 0) as trackers:
        trackers.write(record(1))
    assert caplog.messages == ["TensorBoard events are not written: Descriptors cannot be created directly."]


def test_a_board_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "board").write_text("a file")
    with caplog.at_level(logging.WARNING), board(tmp_path / "board", 0) as trackers:
        trackers.write(record(1))
    assert "TensorBoard events are not written" in caplog.text


@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    caplog: pytest.LogCaptureFixture, kind: type[Tracker]
) -> None:
    def missing() -> Tracker:
        raise ImportError(kind.extra)

    with Trackers({kind: missing}) as trackers:
        trackers.write(record(1))
    assert caplog.messages == [f"{kind.says} not written: pip install 'flame-train[{kind.extra}]'"]


_OFFLINE = """
import sys, json
from pathlib import Path
from flame_train.training.trackers import Trackers
from flame_train.training.trackers import WeightsAndBiases
folder, grid, records = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
config = {"format": 1, "model": {"checkpoint": "/home/somebody/base.safetensors"}, "train": {"steps": 8}}
with Trackers({WeightsAndBiases: lambda: WeightsAndBiases(folder, "loras", config, "my-run")}) as trackers:
    for record in records:
        trackers.write(record)
    trackers.show(8, grid, ["a cat", "a dog", "a cat"])
"""


def wandb_process(code: str, *arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the library starts threads and a program, and reads the home folder."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_weights_and_biases_offline_has_curves_images_and_config(tmp_path: Path, samples: Any) -> None:
    """Read back from the file that `wandb sync` would send."""
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    folder.mkdir()
    records = json.dumps([record(step, loss=step / 2) for step in (7, 8)])
    ended = wandb_process(_OFFLINE, str(folder), str(samples[0]), records, home=tmp_path, WANDB_MODE="offline")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert not any(words in ended.stderr for words in ("Traceback", "no longer written")), ended.stderr
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    raw = log.read_bytes()
    for told in (b"my-run", b"loras", b"base.safetensors", b"memory_gib", b"samples/01 a cat"):
        assert told in raw
    assert b"/home/somebody" not in raw
    assert len(list((folder / "wandb").rglob("*.png"))) == 3


def test_weights_and_biases_plays_clips(tmp_path: Path, clips: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    folder.mkdir()
    code = _OFFLINE.replace('["a cat", "a dog", "a cat"]', '["a cat", "a dog"]')
    ended = wandb_process(code, str(folder), str(clips), json.dumps([record(7)]), home=tmp_path, WANDB_MODE="offline")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "no longer written" not in ended.stderr
    kept = [io.BytesIO(file.read_bytes()) for file in (folder / "wandb").rglob("*.gif")]
    assert [getattr(Image.open(file), "n_frames", 1) for file in kept] == [5, 5]


def test_weights_and_biases_without_a_login_costs_one_warning(tmp_path: Path, samples: Any) -> None:
    """It asks nobody, and reaches for no network."""
    pytest.importorskip("wandb")
    (tmp_path / "run").mkdir()
    environment = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
    ended = wandb_process(
        _OFFLINE, str(tmp_path / "run"), str(samples[0]), json.dumps([record(1)]), home=tmp_path, **environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "Weights & Biases is not written: nobody is logged in; run `wandb login`" in ended.stderr
    assert list((tmp_path / "run").iterdir()) == []
