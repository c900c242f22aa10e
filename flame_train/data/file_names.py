"""What names of files in a dataset's folder say amiss: no images, clips that are not read, two files of one name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flame_train.data.companion_files import MASK_ENDINGS
from flame_train.data.image_formats import CLIP_ENDINGS, IMAGES
from flame_train.errors import counted, shown

_CLIPS = "MP4, MOV, WebM or MKV"
_OTHER_CLIPS = (".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".ts", ".m2ts", ".ogv", ".3gp")


def no_image(files: Sequence[str], clips: bool) -> str:
    """Says that none of the files is an image, or a clip where these are wanted."""
    among = f" among {counted(len(files), 'file')}, e.g. {shown(files[0])}" if files else ""
    kinds, formats = ("images or clips", f"; {_CLIPS}") if clips else ("images", "")
    wanted = f"put {kinds} with captions into the folder ({', '.join(sorted(IMAGES))}{formats})"
    return f"no usable {'image or clip' if clips else 'image'}{among}: {wanted}{about_clips(files, clips)}"


def about_clips(others: Sequence[str], clips: bool) -> str:
    """Says what clips among files that were passed over need; empty if there are none."""
    endings = {os.path.splitext(key)[1].lower() for key in others}
    if clips:
        return f"; convert clips to {_CLIPS}" if endings.intersection(_OTHER_CLIPS) else ""
    return "; clips need a model of video, and data.frames" if endings & CLIP_ENDINGS else ""


def clips_named_as_masks(files: Sequence[str]) -> dict[str, str]:
    """Returns what is wrong with clips that are named as the mask of another file, by their paths."""
    stems = {os.path.splitext(key)[0] for key in files}
    return {
        key: f"{shown(key)}: named as a mask, which is a still for all frames: put a PNG in its place, or rename it"
        for key in files
        for stem, ending in [os.path.splitext(key)]
        if ending.lower() in CLIP_ENDINGS
        and any(stem.endswith(mask) and stem.removesuffix(mask) in stems for mask in MASK_ENDINGS)
    }


def of_one_name(images: Sequence[str]) -> list[str]:
    """Returns a notice of images and clips that have one name but for the ending, if there are such."""
    by_stem = dict[str, list[str]]()
    for key in images:
        by_stem.setdefault(os.path.splitext(key)[0], []).append(key)
    same = [keys for keys in by_stem.values() if len(keys) > 1]
    if not same:
        return []
    are = counted(len(same), "name is", "names are")
    return [
        f"{are} of several images, e.g. {' and '.join(map(shown, same[0]))}: they have one caption file and one mask; "
        "rename one if they should not"
    ]
