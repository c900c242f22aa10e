"""Clips in other trainers' configs: how many frames they have, which of a file's these are, and at which rate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .table import NOTHING, Changed, Convert, Lost, Source, is_off

_NO_TIME: Final = "clips need a model of video, and this one is of images"
_SHORT: Final = 'too short a clip is left out there, and here with data.on_bad_image = "skip"'
_EVERY: Final = "every frame of a file counts there; here as many a second as data.fps says, 24 if nothing does"
_FULL: Final = "all of a clip; name several numbers in data.frames, of which each gets the most that it fills"
_COVERED: Final = "as many as cover the clip here"


def fitting(numbers: Any, source: Source) -> list[int]:
    """Returns the numbers of frames that fill latents of this family, each the nearest below; none of a still."""
    stride = source.fact("frame_stride")
    named = numbers if isinstance(numbers, list) else [numbers]
    return sorted({(int(each) - 1) // stride * stride + 1 for each in named if each}) if stride else []


def frames(key: str, stills: bool = False, remark: str = _SHORT) -> Convert:
    """Returns the conversion of one number of frames or several into `key`; 1 counts with `stills` alone."""

    def convert(value: Any, source: Source) -> Any:
        named = value if isinstance(value, list) else [value]
        if not any(int(each or 0) > 1 for each in named) and not stills:
            return NOTHING
        if not source.fact("frame_stride"):
            return Lost(_NO_TIME)
        found = [each for each in fitting(named, source) if each > 1 or stills]
        return Changed({key: found}, remark) if key.startswith("set.") else {key: found[-1]}

    return convert


def of_clips(convert: Convert, named: str) -> Convert:
    """Returns a conversion that means something beside a setting `named` that is on."""

    def checked(value: Any, source: Source) -> Any:
        return NOTHING if is_off(source.get(named)) else convert(value, source)

    return checked


def _lengths(value: Any, source: Source) -> Any:
    """Converts musubi-tuner's target_frames, of which a clip gives a part of each length."""
    answer = frames("set.frames", stills=True)(value, source)
    if isinstance(answer, Changed) and len(answer.value["set.frames"]) > 1:
        return Changed(answer.value, "a part of each length there; here of the most that the clip fills")
    return answer


def _extracted(value: Any, source: Source) -> Any:
    """Converts musubi-tuner's frame_extraction (image_video_dataset.py:742)."""
    stride, parts = source.get("frame_stride", 1), source.get("frame_sample", 1)
    evenly = Changed("overlapping", "", (f"parts are {parts} there (frame_sample), and {_COVERED}",))
    known = {
        "head": NOTHING,
        "chunk": "chunk",
        "slide": Changed("overlapping", "", (f"parts begin every {stride} frames there (frame_stride); {_COVERED}",)),
        "uniform": NOTHING if parts == 1 else evenly,
        "full": Lost(_FULL),
    }
    return known.get(value, Lost("data.frame_extraction has head, middle, chunk and overlapping"))


def _rate(value: Any, source: Source) -> Any:
    """Converts source_fps, with which musubi-tuner takes as many frames a second as it has for Wan."""
    return Lost(_EVERY) if is_off(value) else Changed(16, "musubi-tuner's rate for Wan; Wan 2.2 5B has 24")


def _folder(value: Any, source: Source) -> Any:
    return str(value) if source.fact("frame_stride") else Lost(_NO_TIME)


OF_MUSUBI: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "video_directory": _folder,
        "target_frames": of_clips(_lengths, "video_directory"),
        "frame_extraction": of_clips(_extracted, "video_directory"),
        "source_fps": of_clips(_rate, "video_directory"),
    }
)


def has_clips(source: Source) -> bool:
    """Says whether any folder of diffusion-pipe's has clips."""
    named = [one["frame_buckets"].value for one in source.sets if "frame_buckets" in one]
    return any(each > 1 for numbers in named for each in numbers)


def _of_file(value: Any, source: Source) -> Any:
    """Converts diffusion-pipe's video_clip_mode (models/base.py:113); its older versions had the last."""
    known = {"single_beginning": NOTHING, "single_middle": "middle", "multiple_overlapping": "overlapping"}
    return known.get(value, Lost("no such choice of frames here")) if has_clips(source) else NOTHING


def _sizes(value: Any, source: Source) -> Any:
    """Converts size_buckets, of whose width, height and frames the last stay."""
    lost = "buckets follow from the images' shapes and data.bucket_step"
    if is_off(value):
        return NOTHING
    answer = frames("set.frames")([each[2] for each in value if len(each) > 2], source)
    return Changed(answer.value, "their frames", (lost,)) if isinstance(answer, Changed) else Lost(lost)


OF_DIFFUSION_PIPE: Final[Mapping[str, Convert]] = MappingProxyType(
    {"frame_buckets": frames("set.frames"), "video_clip_mode": _of_file, "size_buckets": _sizes}
)


def _of_dataset(value: Any, source: Source) -> Any:
    """Converts ai-toolkit's num_frames (dataloader_mixins.py:563), spread over the file unless that is turned off."""
    spread = source.get("shrink_video_to_frames", True)
    lost = "the frames of a clip are spread over all of its file; here they follow each other at data.fps"
    anywhere = "they begin anywhere in the file; here as data.frame_extraction says, at its beginning"
    answer = frames("set.frames")(value, source)
    return Changed(answer.value, _SHORT, (lost if spread else anywhere,)) if isinstance(answer, Changed) else answer


def _dataset_rate(value: Any, source: Source) -> Any:
    clips = int(source.get("num_frames") or 1) > 1 and source.fact("frame_stride")
    return NOTHING if not clips or source.get("shrink_video_to_frames", True) else {"set.fps": int(value)}


def _sample_rate(named: str) -> Convert:
    """Returns the conversion of a rate of samples, which counts beside a number of frames of more than one."""
    return lambda value, source: (
        int(value) if value and source.fact("frame_stride") and int(source.get(named) or 1) > 1 else NOTHING
    )


OF_AI_TOOLKIT: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "num_frames": _of_dataset,
        "fps": _dataset_rate,
        "sample.num_frames": frames("sample.frames"),
        "sample.fps": _sample_rate("sample.num_frames"),
    }
)


def _kept_short(value: Any, source: Source) -> Any:
    same = value in (None, source.get("video.num_frames"))
    return NOTHING if same else Lost("shorter clips are left out there; take them out by hand")


OF_SIMPLETUNER: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "video.num_frames": lambda v, s: (
            Lost("SimpleTuner takes five seconds; set data.frames")
            if v is None
            else frames("set.frames", remark=f"{_SHORT}; {_EVERY}")(v, s)
        ),
        "video.min_frames": _kept_short,
        "validation_num_video_frames": frames("sample.frames"),
        "framerate": _sample_rate("validation_num_video_frames"),
    }
)
