"""Clips in other trainers' configs: how many frames they have, which of a file's these are, and at which rate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .conversions import number, side
from .table import NOTHING, Changed, Convert, Lost, Setting, Source, is_off

_NO_TIME: Final = "clips need a model of video, and this one is of images"
_SHORT: Final = 'too short a clip is left out there, and here with data.on_bad_image = "skip"'
_EVERY: Final = "every frame of a file counts there; here as many a second as data.fps says, 24 if nothing does"
_FULL: Final = "all of a clip; name several numbers in data.frames, of which each gets the most that it fills"
_COVERED: Final = "as many as cover the clip here"


def count(value: Any) -> int:
    """Returns a number of frames, which may be text; 0 where it is none."""
    frames = number(value)
    return int(frames) if isinstance(frames, int | float) and frames >= 1 and frames == int(frames) else 0


def fitting(numbers: Any, source: Source, stride: str = "frame_stride") -> list[int]:
    """Returns the numbers of frames that fill latents of this family, each the nearest below.

    There are none for a family of images, and where one is no number.
    """
    step = source.fact(stride) or source.fact("frame_stride")
    counts = [count(each) for each in (numbers if isinstance(numbers, list) else [numbers])]
    return sorted({(each - 1) // step * step + 1 for each in counts}) if step and all(counts) else []


def moving(numbers: Any, source: Source) -> bool:
    """Says whether numbers of frames make clips of this family."""
    return any(each > 1 for each in fitting(numbers, source))


def frames(key: str, stills: bool = False, remark: str = _SHORT, stride: str = "frame_stride") -> Convert:
    """Returns the conversion of one number of frames or several into `key`; 1 counts with `stills` alone."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value) and not stills:
            return NOTHING
        counts = [count(each) for each in (value if isinstance(value, list) else [value])]
        if not counts or not all(counts):
            return Lost("expected whole numbers of frames, each 1 or more")
        if max(counts) == 1 and not stills:
            return NOTHING
        if not source.fact("frame_stride"):
            return Lost(_NO_TIME)
        found = [each for each in fitting(counts, source, stride) if each > 1 or stills]
        if not found:
            return Lost(f"fewer than {source.fact('frame_stride') + 1} frames are a still of this model")
        return Changed({key: found}, remark) if key.startswith("set.") else {key: found[-1]}

    return convert


def rate(key: str, value: Any) -> Any:
    """Converts frames a second, which are whole here."""
    if is_off(value):
        return NOTHING
    there = number(value)
    if not isinstance(there, int | float):
        return Lost("expected a number of frames a second")
    here = max(1, round(there))
    return {key: here} if here == there else Changed({key: here}, f"rounded: {there:g} there, and whole here")


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


def _of_parts(convert: Convert) -> Convert:
    """Returns a conversion that means something beside a folder's target_frames, which are carried over."""

    def checked(value: Any, source: Source) -> Any:
        if fitting(source.get("target_frames", 1), source):
            return convert(value, source)
        return NOTHING if is_off(value) else Lost("it is of target_frames, which are not carried over")

    return of_clips(checked, "video_directory")


OF_MUSUBI: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "video_directory": _folder,
        "target_frames": of_clips(_lengths, "video_directory"),
        "frame_extraction": _of_parts(_extracted),
        "source_fps": _of_parts(_rate),
    }
)


def _buckets(one: Mapping[str, Setting]) -> list[Any]:
    """Returns the numbers of frames of a folder of diffusion-pipe's; size_buckets win (utils/dataset.py:461)."""
    named = one.get("size_buckets") or one.get("frame_buckets")
    numbers = [] if named is None else named.value if isinstance(named.value, list) else [named.value]
    return [each[-1] for each in numbers if isinstance(each, list) and each] if "size_buckets" in one else numbers


def has_clips(source: Source) -> bool:
    """Says whether any folder of diffusion-pipe's has clips."""
    return any(moving(_buckets(one), source) for one in source.sets)


def unless_sized(convert: Convert) -> Convert:
    """Returns the conversion of a setting of folders that diffusion-pipe reads where they have no size_buckets."""
    return lambda value, source: NOTHING if source.get("size_buckets") else convert(value, source)


def _of_file(value: Any, source: Source) -> Any:
    """Converts diffusion-pipe's video_clip_mode (models/base.py:113); its older versions had the last."""
    known = {"single_beginning": NOTHING, "single_middle": "middle", "multiple_overlapping": "overlapping"}
    return known.get(value, Lost("no such choice of frames here")) if has_clips(source) else NOTHING


def _sizes(value: Any, source: Source) -> Any:
    """Converts size_buckets, each a width, a height and frames: the side of a square of their area, and the frames."""
    reasons = ["buckets follow from the images' shapes and data.bucket_step"]
    if is_off(value):
        return NOTHING
    sized = [each for each in value if isinstance(each, list) and len(each) == 3]
    if not sized:
        return Lost(f"expected a list of widths, heights and frames; {reasons[0]}")
    answers = [side(each[:2], source) for each in sized]
    sides = {each.value if isinstance(each, Changed) else each for each in answers if not isinstance(each, Lost)}
    keys: dict[str, Any] = {"set.resolution": max(sides)} if sides else {}
    if len(sides) > 1:
        reasons.append("the largest of their areas is that of all")
    answer = frames("set.frames")([each[2] for each in sized], source)
    if isinstance(answer, Changed):
        keys |= answer.value
    elif isinstance(answer, Lost):
        reasons.append(answer.reason)
    return Changed(keys, "the side of a square of their area, and their frames", tuple(reasons))


OF_DIFFUSION_PIPE: Final[Mapping[str, Convert]] = MappingProxyType(
    {"frame_buckets": unless_sized(frames("set.frames")), "video_clip_mode": _of_file, "size_buckets": _sizes}
)


def _of_dataset(value: Any, source: Source) -> Any:
    """Converts ai-toolkit's num_frames (dataloader_mixins.py:563), spread over the file unless that is turned off."""
    spread = source.get("shrink_video_to_frames", True)
    lost = "the frames of a clip are spread over all of its file; here they follow each other at data.fps"
    anywhere = "they begin anywhere in the file; here as data.frame_extraction says, at its beginning"
    answer = frames("set.frames")(value, source)
    return Changed(answer.value, _SHORT, (lost if spread else anywhere,)) if isinstance(answer, Changed) else answer


def _dataset_rate(value: Any, source: Source) -> Any:
    clips = moving(source.get("num_frames"), source)
    return NOTHING if not clips or source.get("shrink_video_to_frames", True) else rate("set.fps", value)


OF_AI_TOOLKIT: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "num_frames": _of_dataset,
        "fps": _dataset_rate,
        "do_i2v": lambda v, s: (
            Lost("no first frame is given to a clip here") if v and s.fact("frame_stride") else NOTHING
        ),
        "sample.num_frames": frames("sample.frames"),
    }
)


def _kept_short(value: Any, source: Source) -> Any:
    same = value is None or number(value) == number(source.get("video.num_frames"))
    return NOTHING if same else Lost("shorter clips are left out there; take them out by hand")


def _sampled(source: Source) -> int:
    """Returns the frames of a sample of SimpleTuner's: of Wan 81 at most, and where nothing is said."""
    most = source.fact("simpletuner_most_frames")
    named = count(source.get("validation_num_video_frames") or most)
    return min(named, most) if most else named


def _sample_frames(value: Any, source: Source) -> Any:
    """Converts frames of samples, which the pipeline makes fill latents (helpers/models/wan/pipeline.py:798)."""
    stride, named = source.fact("frame_stride"), _sampled(source)
    if source.get("validation_num_video_frames") is None and not source.get("validation_prompt"):
        return NOTHING
    answer = frames("sample.frames")(named // stride * stride + 1 if stride and named else value, source)
    cut = isinstance(answer, dict) and named < count(value)
    return Changed(answer, f"SimpleTuner draws {named} at most") if cut else answer


def _sample_rate(value: Any, source: Source) -> Any:
    drawn = source.get("validation_prompt") or source.get("validation_num_video_frames")
    return rate("sample.fps", value) if drawn and source.fact("frame_stride") and _sampled(source) > 1 else NOTHING


OF_SIMPLETUNER: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "video.num_frames": lambda v, s: (
            Lost("SimpleTuner takes five seconds; set data.frames")
            if v is None
            else frames("set.frames", True, f"{_SHORT}; {_EVERY}", "simpletuner_frame_stride")(v, s)
        ),
        "video.min_frames": _kept_short,
        "validation_num_video_frames": _sample_frames,
        "framerate": _sample_rate,
    }
)
