"""SDXL's networks from its files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Final

from flame_train.errors import ModelFileError
from flame_train.io.weights import open_weights
from flame_train.models.sdxl import keys as sdxl
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder

_NETWORKS: Final = built_by(
    unet=(UNet, UNetArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.sdxl())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="gelu")),
)
_ALONE: Final = {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2"}
SDXL_FILES: Final = FamilyFiles("sdxl", sdxl.COMPONENTS, sdxl.resolve, _ALONE, _NETWORKS)

_V_MARKERS: Final = frozenset({"v_pred", "ztsnr"})  # empty tensors in single files of such models, as NoobAI's
_EDM: Final = ("edm_mean", "edm_std", "edm_vpred.")  # as in Playground v2.5's and CosXL's single files
_NOT_EDM: Final = (
    "is an EDM model ({}), such as Playground v2.5 and CosXL: its noise levels and targets are others than SDXL's, "
    "and are not trained here; name a model made from SDXL base"
)
_SCHEDULE: Final = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_PREDICTIONS: Final = {"v": "v", "v_prediction": "v", "epsilon": "epsilon", "flow": "flow"}
_MAX_CONFIG_BYTES: Final = 1_000_000


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
    """What a scheduler's file says; empty where it says nothing. Raises ModelFileError for what is not trained here."""
    try:
        with scheduler.open("rb") as file:
            content: Any = json.loads(file.read(_MAX_CONFIG_BYTES))
        name, said = str(content.get("_class_name", "")), str(content.get("prediction_type", ""))
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
    if said and said not in _PREDICTIONS:
        raise ModelFileError(f"{scheduler}: predicts {said!r}; expected one of {', '.join(_PREDICTIONS)}")
    if other:
        raise ModelFileError(f"{scheduler}: {', '.join(other)}: expected SDXL's noise schedule, {_SCHEDULE}")
    return _PREDICTIONS.get(said, "")
