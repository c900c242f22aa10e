"""Clips beside stills, from a config to a LoRA and to sampled clips, on a small Wan with random weights."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from flame_train import cli
from flame_train.data import clips as of_clips
from flame_train.data.clip_files import mp4, sample_bytes, times, webp
from flame_train.data.grid import grid
from flame_train.show import grids
from flame_train.show.gallery import samples
from flame_train.show.grids import cropped
from flame_train.show.run_reader import RunReader
from flame_train.show.svg import html
from tests.recipes.bases import lose_end, options, small_base, trainer
from tests.run_files import log_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "wan")


def moving(frames: int, begin: int, side: int = 64) -> np.ndarray[Any, Any]:
    """A bright square that moves two pixels a frame to the right."""
    made = np.full((frames, side, side, 3), 30, np.uint8)
    for number in range(frames):
        made[number, 20:36, begin + 2 * number : begin + 2 * number + 16] = (220, 60, 40)
    return made


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.webp").write_bytes(webp(moving(9, 4 * number), times(9, 24)))
        (folder / f"{number}.txt").write_text("a red square")
    Image.fromarray(moving(1, 4)[0]).save(folder / "still.png")
    (folder / "still.txt").write_text("a red square")
    mask = np.zeros((64, 64), np.uint8)
    mask[:32] = 255
    Image.fromarray(mask).save(folder / "0.mask.png")
    return folder


@pytest.fixture
def train(base: Path, clips: Path, tmp_path: Path) -> Callable[..., int]:
    run = trainer(base, clips, tmp_path, "t5_tokens = 77")
    return lambda *settings: run(*options("data.frames=[5, 9]", f"data.cache={tmp_path / 'cache'}", *settings))


def frames_of(raw: bytes) -> list[np.ndarray[Any, Any]]:
    with Image.open(io.BytesIO(raw)) as image:
        found = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            found.append(np.asarray(image.convert("RGB")))
        return found


def test_a_run_of_clips_and_stills_continues_to_the_same_bytes(train: Callable[..., int], tmp_path: Path) -> None:
    more = "sample.frames=5", "data.masks=files", "data.flip=true", "loss.offset_noise=0.1", "loss.pyramid_noise=2"
    assert train(*more) == 0
    run = tmp_path / "run"
    log = log_of(run)
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    rows = {row["file"]: row.get("span") for row in json.loads((run / "dataset.json").read_text())}
    assert rows == {f"{i}.webp": {"first": 0, "count": 9, "fps": 24} for i in range(3)} | {"still.png": None}
    last = run / "checkpoints" / "step-000004"
    whole, drawn = (last / "lora.safetensors").read_bytes(), (run / "samples" / "step-000004.webp").read_bytes()
    assert [frame.shape for frame in frames_of(drawn)] == [(64, 64, 3)] * 5
    lose_end(run)
    (run / "samples" / "step-000004.webp").unlink()
    assert train(*more) == 0
    assert (last / "lora.safetensors").read_bytes() == whole
    assert (run / "samples" / "step-000004.webp").read_bytes() == drawn
    (first, *_, newest) = RunReader(run).read().grids
    assert (newest.file, newest.step, first.step) == ("step-000004.webp", 4, 0)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("data.frames=16", "data.frames: expected 1 and a multiple of 4, such as 13 or 17, got 16"),
        ("sample.frames=3", "sample.frames: expected 1 and a multiple of 4, such as 1 or 5, got 3"),
        ("data.frames=13", "a clip of 9 frames at 24 a second, expected 13"),
        ("data.fps=12", "a clip of 5 frames at 12 a second, expected 9"),
    ],
)
def test_wrong_frames_are_told(train: Callable[..., int], capsys: Capture, setting: str, told: str) -> None:
    more = ("data.frames=9",) if setting == "data.fps=12" else ()
    assert train(*more, setting) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("data.frames=[]", "data.fps=12"), "data.fps: it has no effect without data.frames"),
        (("data.frames=[]", "data.frame_extraction=chunk"), "data.frame_extraction: it has no effect without data.fra"),
        (
            ("data.path=", 'data.sets=[{{path = "{0}"}}, {{path = "{0}/b", frames = [], fps = 8}}]'),
            "fps of table 2: it has no effect without data.frames",
        ),
    ],
)
def test_keys_of_clips_without_a_number_of_frames_are_told(
    train: Callable[..., int], clips: Path, capsys: Capture, settings: tuple[str, ...], told: str
) -> None:
    assert train(*(setting.format(clips) for setting in settings)) == 2
    assert told in capsys.readouterr().err


def test_the_parts_and_views_of_a_clip_are_encoded_in_one_pass(
    train: Callable[..., int], clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, frames = [], of_clips.frames_of
    monkeypatch.setattr(of_clips, "frames_of", lambda data, name: begun.append(Path(name).name) or frames(data, name))
    assert train("data.frames=5", "data.frame_extraction=overlapping", "data.flip=true", "train.steps=1") == 0
    assert Counter(begun) == {f"{number}.webp": 3 for number in range(3)}  # for the plan, to encode, for thumbnails


def test_a_damaged_clip_is_told_before_the_first_step(
    train: Callable[..., int], clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    raw = (clips / "1.webp").read_bytes()
    (clips / "1.webp").write_bytes(raw[: len(raw) // 2])
    assert train() != 0
    assert "1.webp: the WEBP is damaged" in capsys.readouterr().err
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize("ending", ["webp", "mp4"])
def test_a_sampled_clip_has_the_same_bytes_each_time(base: Path, tmp_path: Path, ending: str) -> None:
    if ending == "mp4":
        pytest.importorskip("av")
    words = "sample", "-m", str(base), "-p", "a red square", "--steps", "2", "--width", "64", "--height", "64"
    more = "--frames", "5", "--fps", "8", "--precision", "fp32", "--device", "cpu"
    files = [tmp_path / f"{name}.{ending}" for name in "ab"]
    assert [cli.run([*words, *more, "-o", str(file)]) for file in files] == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes()
    if ending == "webp":
        found = frames_of(files[0].read_bytes())
        assert len(found) == 5
        assert any((frame != found[0]).any() for frame in found)


def test_a_clip_is_not_written_as_png(base: Path, tmp_path: Path, capsys: Capture) -> None:
    words = "sample", "-m", str(base), "-p", "x --f 5", "--device", "cpu", "--precision", "fp32"
    assert cli.run([*words, "-o", str(tmp_path / "a.png")]) != 0
    assert "expected a name ending in .webp, got .png" in capsys.readouterr().err


def test_a_grid_of_clips_plays_them_together_and_cuts_them_apart() -> None:
    """A shorter clip and a still keep their last frame."""
    red, blue = moving(6, 0), moving(3, 20)[..., ::-1]
    still = moving(1, 9)[0]
    sheet = grid([red, blue, still])
    assert sheet.shape == (6, 132, 132, 3)
    np.testing.assert_array_equal(sheet[5, :64, 68:], blue[2])
    np.testing.assert_array_equal(sheet[5, 68:, :64], still)
    (part,) = cropped(sample_bytes(sheet, 10), [(0, 0, 64, 64)], 32, "JPEG")
    found = frames_of(part)
    assert len(found) == 6
    assert found[0].shape == (32, 32, 3)
    places = [frame[14].astype(int).max(-1).argmax() for frame in found]
    with Image.open(io.BytesIO(part)) as image:
        assert [frame.load() and frame.info["duration"] for frame in ImageSequence.Iterator(image)] == [100] * 6
    assert places == sorted(places)
    assert places[-1] > places[0] + 3


def test_a_grid_of_clips_that_no_webp_holds_is_told_before_anything_is_drawn(
    train: Callable[..., int], base: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompts = ", ".join(f'"{number}"' for number in range(9))
    settings = f"sample.prompts=[{prompts}]", "sample.width=5504", "sample.frames=5"
    assert train(*settings) == 2
    told = "sample.prompts: a grid of 9 clips has a side of 16,520 pixels, and a WebP or MP4 has at most 16,383"
    assert told in capsys.readouterr().err
    words = "sample", "-m", str(base), "-o", str(tmp_path / "a.webp"), "--width", "8192", "--frames", "5"
    assert cli.run([*words, *("-p", "x") * 2, "--device", "cpu", "--precision", "fp32"]) == 2
    assert "a grid of 2 clips has a side of 16,388 pixels" in capsys.readouterr().err


def test_a_grid_too_large_for_the_page_is_named_there(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("sample.frames=5", "train.steps=1") == 0
    (run,) = RunReader(tmp_path / "run").read().grids[:1]
    assert run.file == "step-000000.webp"
    monkeypatch.setattr(grids, "_LARGEST_CLIP", 64 * 64 * 5 - 1)
    view = RunReader(tmp_path / "run").read()
    assert not view.grids
    drawn = html(samples(view, lambda grid, number: "x"))
    assert "1 grid is too large to be shown here" in drawn
    assert "No sample images were drawn" not in drawn


@pytest.mark.parametrize("key", ["frames = [1]", "fps = 16", 'frame_extraction = "chunk"'])
def test_a_set_has_no_keys_of_clips_for_a_model_of_images(
    tmp_path_factory: pytest.TempPathFactory, clips: Path, tmp_path: Path, capsys: Capture, key: str
) -> None:
    """As the keys of `[data]` are refused: a number of frames would fail in the midst of encoding."""
    for clip in clips.glob("*.webp"):
        clip.unlink()
    train = trainer(small_base(tmp_path_factory, "sdxl"), clips, tmp_path)
    assert train(*options('data.path=""', f'data.sets=[{{path = "{clips}", {key}}}]')) == 2
    assert f"{key.split()[0]} of table 1: it has no effect on a model of images" in capsys.readouterr().err


@pytest.mark.usefixtures("train")
def test_clips_and_stills_of_one_size_have_a_row_each_in_the_plan(tmp_path: Path, capsys: Capture) -> None:
    words = "train", str(tmp_path / "config.toml"), "--device", "cpu", "--dry-run"
    assert cli.run([*words, *options("data.frames=[5, 9]")]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "64x64 pixels 1 image, scaled by 1.00 64x64 pixels, 9 frames 3 images, scaled by 1.00" in plan


def test_a_dataset_of_clips_is_reported_with_its_thumbnails(
    base: Path, clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("av")
    (clips / "film.mp4").write_bytes(mp4(moving(9, 0), 24))
    (clips / "film.txt").write_text("a red square")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{base}"\n[data]\npath = "{clips}"\nframes = [5, 9]\nresolution = 64\n'
        f'bucket_step = 32\n[output]\ndir = "{tmp_path / "run"}"\n'
    )
    assert cli.run(["dataset", str(config), "-o", str(tmp_path / "report")]) == 0
    assert list((tmp_path / "report").glob("bucket-*.png"))
    buckets = capsys.readouterr().out.partition("buckets:\n")[2].splitlines()[:3]
    assert [line.split() for line in buckets] == [
        ["bucket", "images", "scale_least", "scale_most", "cropped_most", "frames"],
        ["64x64", "1", "1", "1", "0"],
        ["64x64", "4", "1", "1", "0", "9"],
    ]
