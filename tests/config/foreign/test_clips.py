"""Clips as other trainers' configs have them: what is carried over, and what is named because it is another thing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flame_train.config.load import from_options
from flame_train.tools.import_config import import_config

PIPE = """
output_dir = "/o"
dataset = "set.toml"
micro_batch_size_per_gpu = 2
{mode}
[model]
type = "wan"
dtype = "bfloat16"
ckpt_path = "/wan"
transformer_path = "/wan2.2_ti2v_5B_fp16.safetensors"
llm_path = "/umt5.safetensors"
[adapter]
type = "lora"
rank = 8
[optimizer]
type = "adamw"
lr = 1e-4
"""


def imported(folder: Path, name: str, text: str, family: str = "") -> tuple[dict[str, Any], dict[str, Any], str]:
    """What an import writes, what it tells, and what it lists as lost in one text."""
    (folder / name).write_text(text)
    ours = folder / "ours.toml"
    ours.unlink(missing_ok=True)
    told = import_config(str(folder / name), ours, family)
    return tomllib.loads(ours.read_text()), told, "\n".join(told["listed"])


def musubi(folder: Path, keys: str, family: str = "wan") -> tuple[dict[str, Any], dict[str, Any], str]:
    text = f'[general]\nresolution = [832, 480]\n[[datasets]]\nvideo_directory = "/v"\n{keys}\n'
    return imported(folder, "dataset.toml", text, family)


@pytest.mark.parametrize(
    ("keys", "carried", "lost"),
    [
        ("target_frames = [33]", {"frames": [33]}, ["every frame of a file counts there"]),
        ("target_frames = [1, 26, 45]\nsource_fps = 30.0", {"frames": [1, 25, 45], "fps": 16}, []),
        ("", {"frames": [1]}, []),
        ('target_frames = [33]\nframe_extraction = "head"', {"frames": [33]}, []),
        ('target_frames = [33]\nframe_extraction = "chunk"', {"frames": [33], "frame_extraction": "chunk"}, []),
        (
            'target_frames = [33]\nframe_extraction = "slide"\nframe_stride = 10',
            {"frames": [33], "frame_extraction": "overlapping"},
            ["frame_extraction: parts begin every 10 frames there (frame_stride); as many as cover the clip here"],
        ),
        (
            'target_frames = [33]\nframe_extraction = "uniform"\nframe_sample = 4',
            {"frames": [33], "frame_extraction": "overlapping"},
            ["frame_extraction: parts are 4 there (frame_sample), and as many as cover the clip here"],
        ),
        ('target_frames = [33]\nframe_extraction = "uniform"', {"frames": [33]}, []),
        ('frame_extraction = "full"\nmax_frames = 81', {"frames": [1]}, ["frame_extraction = 'full': all of a clip"]),
        ("target_frames = []", {}, ["target_frames = []: expected whole numbers of frames"]),
        (
            'target_frames = [0, 33]\nframe_extraction = "chunk"\nsource_fps = 30.0',
            {},
            [
                "target_frames = [0, 33]: expected whole numbers of frames",
                "frame_extraction = 'chunk': it is of target_frames, which are not carried over",
                "source_fps = 30.0: it is of target_frames",
            ],
        ),
    ],
)
def test_musubi_tuners_videos(tmp_path: Path, keys: str, carried: dict[str, Any], lost: list[str]) -> None:
    written, told, listed = musubi(tmp_path, keys)
    data = written["data"]
    assert data["path"] == "/v"
    assert {name: data[name] for name in ("frames", "fps", "frame_extraction") if name in data} == carried
    assert all(each in listed for each in lost)
    if "26" in keys:
        assert "a part of each length there" in str(told["carried"])


def test_videos_are_none_of_a_model_of_images(tmp_path: Path) -> None:
    written, _, listed = musubi(tmp_path, "target_frames = [33]", "qwenimage1")
    assert "frames" not in written["data"]
    assert listed.count("clips need a model of video, and this one is of images") == 2  # its folder and its frames


def test_musubi_tuners_images_have_no_frames(tmp_path: Path) -> None:
    text = '[[datasets]]\nimage_directory = "/i"\n[[datasets]]\nvideo_directory = "/v"\ntarget_frames = [17]\n'
    written, _, _ = imported(tmp_path, "dataset.toml", text, "wan")
    stills, clips = written["data"]["sets"]
    assert (stills["path"], clips["path"]) == ("/i", "/v")
    assert (stills.get("frames"), clips["frames"]) == (None, [17])


@pytest.mark.parametrize(
    ("mode", "extraction"),
    [("", None), ('video_clip_mode = "single_beginning"', None), ('video_clip_mode = "single_middle"', "middle")],
)
def test_diffusion_pipes_videos(tmp_path: Path, mode: str, extraction: str | None) -> None:
    """The bucket of one frame is of images alone there (utils/dataset.py:848)."""
    (tmp_path / "set.toml").write_text(
        'resolutions = [512]\nframe_buckets = [1, 33, 66]\n[[directory]]\npath = "/d"\n'
        '[[directory]]\npath = "/e"\nframe_buckets = [1, 33, 66]\n'
    )
    written, told, _ = imported(tmp_path, "pipe.toml", PIPE.format(mode=mode))
    assert written["data"]["frames"] == [33, 65]
    assert written["data"].get("frame_extraction") == extraction
    assert 'data.on_bad_image = "skip"' in str(told["carried"])


def test_diffusion_pipes_stills_have_no_keys_of_clips(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('resolutions = [512]\nframe_buckets = [1]\n[[directory]]\npath = "/d"\n')
    written, _, listed = imported(tmp_path, "pipe.toml", PIPE.format(mode='video_clip_mode = "single_middle"'))
    assert not {"frames", "frame_extraction"} & written["data"].keys()
    assert "frame" not in listed
    (tmp_path / "set.toml").write_text('size_buckets = [[512, 512, 1], [832, 480, 33]]\n[[directory]]\npath = "/d"\n')
    written, _, listed = imported(tmp_path, "pipe.toml", PIPE.format(mode=""))
    assert written["data"]["frames"] == [33]
    assert "size_buckets: buckets follow from the images' shapes" in listed


_OF_CLIPS = 'video_clip_mode = "single_middle"\nimage_micro_batch_size_per_gpu = 4'


@pytest.mark.parametrize(
    ("folders", "carried", "lost"),
    [
        ("frame_buckets = 33\nresolutions = [512]", {"frames": [33], "resolution": 512}, ""),
        ("size_buckets = [[512, 512, 33]]", {"frames": [33], "resolution": 512}, "size_buckets: buckets follow"),
        (
            "size_buckets = [[832, 480, 33], [512, 512, 1]]\nframe_buckets = [1, 65]\nresolutions = [1024]",
            {"frames": [33], "resolution": 632},
            "size_buckets: the largest of their areas is that of all",
        ),
    ],
)
def test_settings_of_clips_count_whatever_names_their_frames(
    tmp_path: Path, folders: str, carried: dict[str, Any], lost: str
) -> None:
    """size_buckets win over frame_buckets, resolutions and enable_ar_bucket (utils/dataset.py:461)."""
    (tmp_path / "set.toml").write_text(f'{folders}\n[[directory]]\npath = "/d"\n')
    written, _, listed = imported(tmp_path, "pipe.toml", PIPE.format(mode=_OF_CLIPS))
    data = written["data"]
    assert {name: data[name] for name in ("frames", "resolution")} == carried
    assert data["frame_extraction"] == "middle"
    assert "micro_batch_size_per_gpu = 2: of clips" in listed
    assert lost in listed
    assert ("enable_ar_bucket" in listed) == ("size_buckets" not in folders)


def test_clips_that_fill_no_second_latent_are_named(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('resolutions = [512]\nframe_buckets = [1, 2]\n[[directory]]\npath = "/d"\n')
    written, _, listed = imported(tmp_path, "pipe.toml", PIPE.format(mode=_OF_CLIPS))
    assert not {"frames", "frame_extraction"} & written["data"].keys()
    assert "frame_buckets = [1, 2]: fewer than 5 frames are a still of this model" in listed


def test_of_two_batch_sizes_that_of_videos_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('resolutions = [512]\nframe_buckets = [33]\n[[directory]]\npath = "/d"\n')
    written, _, listed = imported(tmp_path, "pipe.toml", PIPE.format(mode="image_micro_batch_size_per_gpu = 4"))
    assert written["data"]["batch_size"] == 4
    assert "micro_batch_size_per_gpu = 2: of clips; a set in [[data.sets]] has a batch size of its own" in listed


def ai_toolkit(folder: Path, dataset: str, sample: str = "", arch: str = "wan22_5b") -> Any:
    text = f"""
job: extension
config:
  name: x
  process:
    - type: sd_trainer
      training_folder: /o
      network: {{type: lora, linear: 8, linear_alpha: 8}}
      datasets:
        - {{folder_path: /d, resolution: [512]{dataset}}}
      train: {{batch_size: 1, steps: 10, lr: 1e-4, optimizer: adamw8bit}}
      model: {{name_or_path: /m, arch: {arch}}}
      sample: {{sampler: flowmatch, sample_every: 5{sample}}}
"""
    return imported(folder, "job.yaml", text)


@pytest.mark.parametrize(
    ("dataset", "carried", "lost"),
    [
        (", num_frames: 1, fps: 24", {}, ""),
        (", num_frames: 41", {"frames": [41]}, "are spread over all of its file"),
        (", num_frames: 42, shrink_video_to_frames: false, fps: 16", {"frames": [41], "fps": 16}, "begin anywhere"),
        (", num_frames: 3, shrink_video_to_frames: false, fps: 16", {}, "fewer than 5 frames are a still"),
        (", num_frames: 41, fps: 16", {"frames": [41]}, "are spread over all of its file"),
        (", num_frames: 41, shrink_video_to_frames: false, fps: 29.97", {"frames": [41], "fps": 30}, "begin anywhere"),
        (", auto_frame_count: true", {}, "auto_frame_count = true: data.frames has numbers"),
        (", do_i2v: true", {}, "no first frame is given"),
    ],
)
def test_ai_toolkits_videos(tmp_path: Path, dataset: str, carried: dict[str, Any], lost: str) -> None:
    written, _, listed = ai_toolkit(tmp_path, dataset)
    assert {name: written["data"][name] for name in ("frames", "fps") if name in written["data"]} == carried
    assert lost in listed


def test_ai_toolkits_window_says_of_images_what_is_of_clips(tmp_path: Path) -> None:
    """It writes these for each model (ui/src/app/jobs/new/jobConfig.ts)."""
    _, _, listed = ai_toolkit(tmp_path, ", num_frames: 1, do_i2v: true, shrink_video_to_frames: true", "", "sdxl")
    assert "frame" not in listed


def test_ai_toolkits_samples_as_clips(tmp_path: Path) -> None:
    sample = ', num_frames: 40, fps: 12, samples: [{prompt: "a fox --frames 18"}, {prompt: "a hare", num_frames: 9}]'
    written, _, _ = ai_toolkit(tmp_path, "", sample)
    assert (written["sample"]["frames"], written["sample"]["fps"]) == (37, 12)
    assert [prompt["frames"] for prompt in written["sample"]["prompts"]] == [17, 9]
    written, _, _ = ai_toolkit(tmp_path, "", ", num_frames: 41")
    assert written["sample"]["fps"] == 16  # ai-toolkit's own
    written, _, listed = ai_toolkit(tmp_path, "", ', num_frames: 1, fps: 1, prompts: ["a fox"]', "sdxl")
    assert not {"frames", "fps"} & written["sample"].keys()
    assert "frames" not in listed
    _, _, listed = ai_toolkit(tmp_path, ", num_frames: 41", ', num_frames: 41, prompts: ["a fox --frames 9"]', "sdxl")
    assert listed.count("clips need a model of video") == 3


@pytest.mark.parametrize(
    ("sample", "fps", "frames", "lost"),
    [
        ('samples: [{prompt: "a fox", num_frames: 9, fps: 8}, {prompt: b --frames 5 --fps 8}]', 8, [9, 5], []),
        ('num_frames: 41, samples: [{prompt: a, fps: "8"}, {prompt: b, num_frames: 1, fps: 30}]', 8, [None, 1], []),
        ('samples: [{prompt: "a fox", num_frames: 9}, {prompt: "a hare"}]', 16, [9, None], []),
        (
            'fps: 12, samples: [{prompt: "a fox", num_frames: 9, fps: 8}, {prompt: "a hare", num_frames: 9}]',
            12,
            [9, 9],
            ["fps = 8 of the prompt 'a fox': samples have one rate here, sample.fps"],
        ),
        (
            'num_frames: 9, fps: 23.976, samples: [{prompt: "a fox", num_frames: x}, {prompt: b, ctrl_idx: 1}]',
            24,
            [None, None],
            [
                "num_frames of the prompt 'a fox': expected a whole number",
                "ctrl_idx of the prompt 'b': no such key here",
            ],
        ),
    ],
)
def test_ai_toolkits_rate_of_samples(
    tmp_path: Path, sample: str, fps: int, frames: list[int | None], lost: list[str]
) -> None:
    """A prompt has its own, and 16 where nothing is said (toolkit/config_modules.py:58, 99)."""
    written, told, listed = ai_toolkit(tmp_path, "", f", {sample}")
    assert written["sample"]["fps"] == fps
    prompts = [{"text": each} if isinstance(each, str) else each for each in written["sample"]["prompts"]]
    assert [prompt.get("frames") for prompt in prompts] == frames
    assert all(each in listed for each in lost)
    assert ("fps = " in listed) == any("fps" in each for each in lost)
    assert ("rounded: 23.976 there" in str(told["carried"])) == ("23.976" in sample)


def simpletuner(folder: Path, family: dict[str, Any], *sets: dict[str, Any]) -> Any:
    (folder / "b.json").write_text(json.dumps([{"instance_data_dir": f"/{i}", **one} for i, one in enumerate(sets)]))
    told = {"model_type": "lora", "data_backend_config": "b.json", "validation_num_video_frames": 42, "framerate": 16}
    return imported(folder, "config.json", json.dumps(told | family))


def test_simpletuners_videos(tmp_path: Path) -> None:
    wan = {"model_family": "wan", "model_flavour": "ti2v-5b-2.2"}
    video = {"id": "v", "dataset_type": "video", "video": {"num_frames": 50, "min_frames": 60, "is_i2v": True}}
    written, _, listed = simpletuner(tmp_path, wan, {"id": "i"}, video)
    stills, clips = written["data"]["sets"]
    assert (stills.get("frames"), clips["frames"]) == (None, [49])
    assert "every frame of a file counts there" in (tmp_path / "ours.toml").read_text()
    assert "shorter clips are left out there" in listed
    assert "no first frame is given" in listed
    assert (written["sample"]["frames"], written["sample"]["fps"]) == (41, 16)
    video["video"]["num_frames"] = "54"  # to one beyond a multiple of 8 (helpers/models/wan/model.py:458)
    written, _, _ = simpletuner(tmp_path, wan | {"framerate": "23.976"}, video)
    assert (written["data"]["frames"], written["sample"]["fps"]) == ([49], 24)
    _, _, listed = simpletuner(tmp_path, wan, {"id": "v", "dataset_type": "video"})
    assert "SimpleTuner takes five seconds; set data.frames" in listed
    written, _, listed = simpletuner(tmp_path, {"model_family": "sdxl"}, {"id": "i"}, video)
    assert written["data"]["path"] == "/0"
    assert "set v: left out: clips need a model of video" in listed
    assert "validation_num_video_frames = 42: clips need a model of video" in listed


def test_one_frame_of_simpletuners_clips_and_frames_of_its_images(tmp_path: Path) -> None:
    """A block of videos counts for sets of videos alone (helpers/data_backend/factory.py:796)."""
    wan = {"model_family": "wan", "model_flavour": "ti2v-5b-2.2", "framerate": "16.0"}
    written, _, _ = simpletuner(tmp_path, wan, {"id": "v", "dataset_type": "video", "video": {"num_frames": 1}})
    assert (written["data"]["frames"], written["sample"]["fps"]) == ([1], 16)
    written, _, listed = simpletuner(tmp_path, wan, {"id": "i", "dataset_type": "image", "video": {"num_frames": 49}})
    assert "frames" not in written["data"]
    assert "set i: video: left out, as SimpleTuner reads it of clips alone" in listed


@pytest.mark.parametrize(
    ("named", "frames", "fps"), [({}, 81, 15), ({"validation_num_video_frames": 40, "framerate": "24"}, 41, 24)]
)
def test_simpletuners_wan_draws_clips(tmp_path: Path, named: dict[str, Any], frames: int, fps: int) -> None:
    """Of 81 frames at 15 a second where nothing is said (helpers/models/wan/model.py:1298, 1556, pipeline.py:798)."""
    told = {"model_type": "lora", "model_family": "wan", "model_flavour": "ti2v-5b-2.2", "validation_prompt": "a fox"}
    written, _, _ = imported(tmp_path, "config.json", json.dumps(told | named))
    assert (written["sample"]["frames"], written["sample"]["fps"]) == (frames, fps)


def test_what_is_carried_is_taken_by_a_run_of_clips(tmp_path: Path) -> None:
    written, _, _ = musubi(tmp_path, 'target_frames = [17, 33]\nframe_extraction = "chunk"\nsource_fps = 30.0')
    data = {name: written["data"][name] for name in ("path", "frames", "fps", "frame_extraction")}
    assert from_options(data=data).data.frames == (17, 33)
