"""What a folder states of a UNet beside its weights, and shapes do not tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.errors import ModelFileError
from flame_train.io.weights import open_weights
from flame_train.networks.files.stated import Stated

_V_MARKERS: Final = frozenset({"v_pred", "ztsnr"})  # empty tensors in single files of such models, as NoobAI's
_EDM: Final = ("edm_mean", "edm_std", "edm_vpred.")  # as in Playground v2.5's and CosXL's single files
_NOT_EDM: Final = (
    "is an EDM model ({}), such as Playground v2.5 and CosXL: its noise levels and targets are others than SDXL's, "
    "and are not trained here; name a model made from SDXL base"
)
_SCHEDULE: Final = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_PREDICTIONS: Final = {"v": "v", "v_prediction": "v", "epsilon": "epsilon", "flow": "flow"}
_MAX_CONFIG_BYTES: Final = 1_000_000
AS_SDXL: Final[dict[str, object]] = {
    **{"act_fn": "silu", "downsample_padding": 1, "conv_in_kernel": 3, "conv_out_kernel": 3},
    **{"center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0},
    **{"time_embedding_type": "positional", "time_embedding_act_fn": None, "timestep_post_act": None},
    **{"resnet_time_scale_shift": "default", "resnet_skip_time_act": False, "resnet_out_scale_factor": 1.0},
    **{"mid_block_scale_factor": 1, "only_cross_attention": False, "dual_cross_attention": False},
    **{"attention_type": "default", "cross_attention_norm": None, "encoder_hid_dim_type": None},
    **{"class_embed_type": None, "addition_embed_type": "text_time", "addition_time_embed_dim": 256},
}
"""What diffusers' UNet may state and shapes do not tell; what else it states is read, or follows from shapes."""


def stated_head_dim(stated: Stated, widths: Sequence[int], depths: Sequence[int]) -> int:
    """The width of a head, of which there is one in all levels with transformers; 0 if the folder does not state it.

    diffusers calls the number of heads of each level `attention_head_dim`. Raises ModelFileError for several widths.
    """
    heads = stated.values.get("num_attention_heads") or stated.values.get("attention_head_dim")
    if heads is None:
        return 0
    each = heads if isinstance(heads, list) else [heads] * len(widths)
    levels = zip(widths, each, depths, strict=False)
    found = {width // n for width, n, depth in levels if depth and isinstance(n, int) and n > 0}
    if len(found) != 1:
        raise ModelFileError(
            f"{stated.path}: attention_head_dim: expected the numbers of heads of one width, found {heads!r}: such a "
            "UNet is not supported here"
        )
    return found.pop()


def stated_prediction(path: str | Path) -> str:
    """ "epsilon", "v" or "flow", if the file or folder says what its UNet predicts, else empty.

    A single file is believed when it says v: epsilon is what most say, those that were made from a v model too.
    """
    with open_weights(path) as weights:
        if edm := next((name for name in weights.names if name.startswith(_EDM)), ""):
            raise ModelFileError(f"{path}: {_NOT_EDM.format(edm)}")
        if not _V_MARKERS.isdisjoint(weights.names) or weights.metadata.get("modelspec.prediction_type") == "v":
            return "v"
        if weights.metadata.get("modelspec.prediction_type") == "flow":
            return "flow"
    scheduler = Path(path) / "scheduler" / "scheduler_config.json"
    return _prediction(scheduler) if scheduler.is_file() else ""


def _prediction(scheduler: Path) -> str:
    """Says what a scheduler's file says; empty where it says nothing.

    Raises ModelFileError for what is not trained here.
    """
    try:
        with scheduler.open("rb") as file:
            content: Any = json.loads(file.read(_MAX_CONFIG_BYTES))
        name, stated = str(content.get("_class_name", "")), str(content.get("prediction_type", ""))
        other = [f"{key} {content[key]!r}" for key, usual in _SCHEDULE.items() if content.get(key, usual) != usual]
    except OSError as error:
        raise ModelFileError(f"{scheduler}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, AttributeError):
        raise ModelFileError(
            f"{scheduler}: expected JSON that describes a scheduler; download the folder again"
        ) from None
    if name.startswith("EDM"):
        raise ModelFileError(f"{scheduler}: {_NOT_EDM.format(name)}")
    if name.startswith("FlowMatch"):
        return "flow"
    if stated and stated not in _PREDICTIONS:
        raise ModelFileError(f"{scheduler}: predicts {stated!r}; expected one of {', '.join(_PREDICTIONS)}")
    if other:
        raise ModelFileError(f"{scheduler}: {', '.join(other)}: expected SDXL's noise schedule, {_SCHEDULE}")
    return _PREDICTIONS.get(stated, "")
