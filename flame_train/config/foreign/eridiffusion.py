"""EriDiffusion's flat YAML, and EriTrainer's JSON, which has OneTrainer's names. Its jobs have ai-toolkit's layout."""

from __future__ import annotations

from typing import Any, Final

from flame_train.errors import ConfigError
from flame_train.families import named_by

from .conversions import checkpoint, optimizer, to_float, to_number
from .table import Program, Reading, Source, Tree, needless, same, turned

_KINDS: Final = named_by("EriDiffusion")
_FLAT: Final = ("weights", "bf16_params", "grad_accum_steps", "steps", "lr", "batch_size", "optimizer")
_PARTS: Final = ("sdxl", "sd35", "sd3", "flux")


def _is_mine(tree: Tree) -> bool:
    """The kind of model, and another of its settings at the top."""
    own = [name for name in tree if name in _FLAT or name.startswith(tuple(f"{part}_" for part in _PARTS))]
    return isinstance(tree.get("model_kind"), str) and bool(own)


def _read(reading: Reading) -> Source:
    kind = str(reading.tree["model_kind"]).lower()
    if kind not in _KINDS:
        raise ConfigError(
            f"{reading.place(('model_kind',))}: model_kind = {kind}: expected sdxl, sd3 or flux; others are not here"
        )
    return Source(_KINDS[kind], reading.flat(reading.tree))


def _precision(value: Any, source: Source) -> Any:
    return "bf16" if value else "fp32"


_ROWS: Final = [
    turned("weights", "model.checkpoint", checkpoint),
    *(
        turned(f"{part}_{name}_path", "model.checkpoint", checkpoint)
        for part in _PARTS
        for name in ("model", "unet", "transformer")
    ),
    *(same(f"{part}_vae_path", "model.vae") for part in _PARTS),
    *(same(f"{part}_{name}_path", f"text_encoders.{name}") for part in _PARTS for name in ("clip_l", "clip_g", "t5")),
    *(same(f"{part}_t5_tokenizer", "text_encoders.t5_vocabulary") for part in _PARTS),
    turned("bf16_params", "train.precision", _precision),
    turned("steps", "train.steps", to_number),
    turned("batch_size", "data.batch_size", to_number),
    turned("grad_accum_steps", "gradient.accumulation", to_number),
    turned("lr", "optimizer.lr", to_float),
    turned("optimizer", "optimizer.name", optimizer),
    turned("(lr schedule)", "schedule.name", lambda value, source: value, absent="constant"),
    *needless(
        "CLIP's vocabulary comes along; the family follows from the checkpoint",
        "model_kind *_clip_l_tokenizer *_clip_g_tokenizer",
    ),
]

PROGRAM: Final = Program("EriDiffusion", _is_mine, _read, _ROWS)
