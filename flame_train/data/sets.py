"""Sets of images: the tables `[[data.sets]]`, each with settings of its own in place of those of `[data]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from flame_train.data.caption_variants import CaptionKeys
from flame_train.data.clips import MAX_FRAMES, ClipRule, Extraction
from flame_train.data.views import ViewRule
from flame_train.io.addresses import local_place
from flame_train.settings import Section, field, one_or_several

Masks = Literal["off", "files", "alpha"]
_USUAL_FPS = 24  # where no model says its own: only problems of files are looked for then


class SetKeys(Section):
    """The keys that stand in `[data]` for all sets, and in a set for itself."""

    resolutions: tuple[Annotated[int, Field(ge=8, le=8192, multiple_of=8)], ...] = field(
        (), "resolutions at which each image is trained, in buckets of each; empty: data.resolution", unit="pixels"
    )
    batch_size: int = field(1, "batch size: images in one micro-batch", unit="images", ge=1, aka=("train_batch_size",))
    repeats: int = field(1, "how often each image comes in one epoch", ge=1, aka=("num_repeats",))
    folder_repeats: bool = field(False, "images in a folder N_name come N times as often, as kohya's trainers have it")
    caption_dropout: float = field(
        0.0, "probability that an image is seen with an empty caption", ge=0, le=1, aka=("caption_dropout_rate",)
    )
    caption: str = field(
        "",
        "caption of images that have none; empty: such an image is an error",
        aka=("instance_prompt", "class_tokens"),
    )
    caption_extension: str = field(".txt", "file name ending of a caption")
    flip: bool = field(False, "images come mirrored, too; both are cached", aka=("flip_aug", "random_flip"))
    random_crop: bool = field(False, "crop anywhere instead of in the centre, in data.views cached views")
    brightness: float = field(0.0, "largest change of brightness, as a share, among the cached views", ge=0, le=1)
    contrast: float = field(0.0, "largest change of contrast, as a share", ge=0, le=1)
    saturation: float = field(0.0, "largest change of saturation, as a share", ge=0, le=1)
    hue: float = field(0.0, "largest turn of the hue, as a share of the circle", ge=0, le=0.5)
    views: int = field(4, "cached views of an image, where crop or colours vary; flip doubles them", ge=1, le=1000)
    masks: Masks = field(
        "off",
        "where masks come from, white where an image counts; files: NAME.mask.png, NAME-masklabel.png or mask_folder",
        aka=("masked_loss", "masked_training"),
    )
    mask_folder: str = field(
        "",
        "folder of masks, each named as its image; empty: masks lie beside the images",
        place=True,
        aka=("mask_path",),
    )
    mask_weight: float = field(
        0.0, "weight of the loss outside the mask", ge=0, le=1, aka=("unmasked_weight", "mask_min_value")
    )
    mask_normalize: bool = field(
        False,
        "divide a masked loss by the mask's mean, so that small masks count as much as large ones",
        aka=("normalize_masked_area_loss",),
    )
    control: tuple[str, ...] = field(
        (),
        "folder of control images (images to edit), each named as its image; a list gives several for each image "
        "(FLUX.2 and FLUX.3 klein, Krea 2, Qwen-Image 2.1 and Edit; FLUX.1 Kontext: one)",
        place=True,
        aka=("control_path", "control_directory", "conditioning_path"),
    )

    frames: tuple[Annotated[int, Field(ge=1, le=MAX_FRAMES)], ...] = field(
        (),
        "frames of a clip; of a list each clip has the most that it fills, 1 makes it an image; empty: no clips (Wan)",
        unit="frames",
        aka=("target_frames", "frame_buckets", "num_frames"),
    )
    fps: int = field(
        0,
        "frames a second at which clips are read, whatever their own; 0: the model's",
        unit="frames/s",
        ge=0,
        le=120,
        aka=("framerate",),
    )
    frame_extraction: Extraction = field(
        "head",
        "which frames of a clip that has more: the first, those in the middle, or all, in parts that follow each other "
        "(chunk) or overlap",
        aka=("video_clip_mode",),
    )

    @field_validator("control", "frames", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return one_or_several(value)


class DataSet(SetKeys):
    """One `[[data.sets]]`: a folder, and what its images have instead of the keys of `[data]` and `[captions]`."""

    path: str = field("", "the folder of images with captions; required", place=True)
    weight: float = field(
        1.0,
        "factor on how often its images come: 0.5 shows half of them in an epoch; 0 leaves the set out",
        ge=0,
        le=1000,
    )
    validation: bool = field(False, "its images are never trained on")
    regularization: bool = field(False, "its images show what is to be kept: its loss has a weight of its own")
    regularization_weight: float = field(1.0, "weight of its loss with regularization", ge=0, le=1000)
    regularization_target: Literal["image", "base"] = field(
        "image",
        "what is learnt with regularization; base: not the image, but what the base model predicts for it",
    )
    captions: CaptionKeys = field(CaptionKeys(), "the keys of [captions] for this set")

    @property
    def folder(self) -> Path:
        """The folder."""
        return local_place(self.path)

    @property
    def control_folders(self) -> tuple[Path, ...]:
        """The folders of control images."""
        return tuple(map(local_place, self.control))

    @property
    def loss_weight(self) -> float:
        """The factor on the loss of its images."""
        return self.regularization_weight if self.regularization else 1.0

    @property
    def base_is_target(self) -> bool:
        """Whether the base model's prediction is the target of its images."""
        return self.regularization and self.regularization_target == "base"

    @property
    def clip_rule(self) -> ClipRule | None:
        """Which frames its clips have; None: it has no clips."""
        return ClipRule(self.frames, self.fps or _USUAL_FPS, self.frame_extraction) if self.frames else None

    @property
    def view_rule(self) -> ViewRule:
        """Which views its images have."""
        return ViewRule(
            self.flip, self.random_crop, (self.brightness, self.contrast, self.saturation, self.hue), self.views
        )


def image_sets(data: Any, captions: CaptionKeys | None = None) -> tuple[DataSet, ...]:
    """Returns the sets of the sections `[data]` and `[captions]`, whose keys hold where a set has none of its own.

    Without sets there is one, of `data.path`.
    """
    usual = {name: getattr(data, name) for name in SetKeys.model_fields}
    usual["resolutions"] = data.resolutions or (data.resolution,)
    every = captions or CaptionKeys()
    return tuple(
        one.model_copy(
            update={
                **{name: value for name, value in usual.items() if name not in one.model_fields_set},
                "captions": every.model_copy(update=_given(one.captions)),
            }
        )
        for one in data.sets or (DataSet(path=data.path),)
    )


def _given(section: Section) -> Mapping[str, Any]:
    return {name: getattr(section, name) for name in section.model_fields_set}
