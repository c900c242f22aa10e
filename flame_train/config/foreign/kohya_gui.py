"""The JSON that kohya's web interface saves (bmaltais/kohya_ss): its names for what it then tells sd-scripts.

`read` does what the interface's `train_model` does (lora_gui.py:2147): it makes arguments of sd-scripts of the boxes.
The tables of sd-scripts carry these over. A box that is at its default has no line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import options_of
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import sd_scripts
from .conversions import number
from .kohya_gui_boxes import BOXES, DEFAULTS, OF_MODELS, RENAMED
from .kohya_gui_networks import NETWORK_BOXES, network, unread
from .sd_scripts_reading import datasets_of, source_of
from .table import Program, Reading, Row, Setting, Source, Tree, needless, never

_MARKS: Final = (
    *("LoRA_type", "max_resolution", "lr_warmup", "flux1_checkbox", "additional_parameters", "LyCORIS_preset"),
    *("noise_offset_type", "stop_text_encoder_training", "optimizer", "epoch", "sdxl"),
)
_MODELS: Final = named_by("kohya-gui boxes")
_OTHERS: Final = MappingProxyType({"hunyuan_image_checkbox": "HunyuanImage", "lumina_checkbox": "Lumina"})
_AT_DEFAULT: Final = "it is at the web interface's default, which changes nothing here"
_NEVER_EMPTY: Final = ("LoRA_type", "epoch", "optimizer", "max_resolution", "lr_scheduler", "network_dim")
"""Boxes that are choices or numbers, whose default the interface takes where a file has nothing in them."""
_MODEL: Final = "it says which model the config is for"
_UNSAID: Final = "the web interface does not hand it on beside the other boxes"
_OTHER_KIND: Final = "it belongs to another kind of adapter, and the web interface does not read it"
_NO_MODEL: Final = "it belongs to a model that this config is not for"


def is_mine(tree: Tree) -> bool:
    """The kind of adapter by the interface's name, or several of its boxes with a name that sd-scripts has not."""
    return "LoRA_type" in tree or (sum(name in tree for name in _MARKS) >= 3 and "network_module" not in tree)


def read(reading: Reading) -> Source:
    boxes = {name: Setting(_plain(one.value), one.place) for name, one in reading.flat(reading.tree).items()}
    family = _family(reading, boxes) or reading.family
    needed, idle = _used(boxes, family)
    absent = {
        name for name in DEFAULTS if _value(boxes, name, "") == "" and (name not in boxes or name in _NEVER_EMPTY)
    }
    absent |= {name for name in DEFAULTS if name in boxes and boxes[name].value is None}
    given = needed | {name: Setting(DEFAULTS[name], "") for name in absent}
    idle |= dict.fromkeys(unread(given), _OTHER_KIND)
    settings = dict(_arguments(given, family))
    settings |= _further(boxes)
    said = {one.written.partition(" ")[0] for one in settings.values()}
    idle |= {name: _MODEL if name in _MODELS else _UNSAID for name in needed if name not in said and name not in idle}
    notes: list[str] = []
    sets = datasets_of(reading, settings, notes)
    return replace(source_of(family, settings, sets, notes, reading.folder), idle=idle)


def _plain(value: Any) -> Any:
    """A number for text that spells one, as the interface reads it (common_gui.py:390)."""
    return number(value) if isinstance(value, str) and value.strip() else value


def _family(reading: Reading, boxes: Mapping[str, Setting]) -> str:
    """The box that is ticked; without any it is Stable Diffusion 1 or 2 (lora_gui.py:1778)."""
    if not {"LoRA_type", "network_dim"} & set(boxes):
        raise ConfigError(f"{reading.file}: expected a LoRA, got a config of another page of the interface")
    for name, other in _OTHERS.items():
        if name in boxes and boxes[name].value:
            raise ConfigError(f"{boxes[name].place}: {name}: no such family here: {other}")
    for name, family in _MODELS.items():
        if name in boxes and boxes[name].value:
            chroma = family == "flux" and _value(boxes, "model_type") == "chroma"
            return "chroma" if chroma else family
    if "sdxl" in boxes and not reading.family:
        place = boxes["sdxl"].place
        raise ConfigError(f"{place}: no box of a model is ticked, which is Stable Diffusion 1 or 2; or add --family")
    return ""


def _value(boxes: Mapping[str, Setting], name: str, usual: Any = None) -> Any:
    return boxes[name].value if name in boxes and boxes[name].value not in ("", None) else usual


def _number(boxes: Mapping[str, Setting], name: str) -> float:
    """A box's number; 0 for one that has none, as the interface takes it (common_gui.py:1205)."""
    value = _value(boxes, name, 0)
    return value if isinstance(value, int | float) else 0


def _used(boxes: Mapping[str, Setting], family: str) -> tuple[dict[str, Setting], dict[str, str]]:
    """The boxes that say something, and of the others the reason why they do not."""
    used: dict[str, Setting] = {}
    idle: dict[str, str] = {}
    for name, box in boxes.items():
        models = OF_MODELS.get(name) or next((own for start, own in OF_MODELS.items() if name.startswith(start)), ())
        if models and family not in models:
            idle[name] = _NO_MODEL
        elif box.value in ("", False, None, []) or (name in BOXES and box.value == BOXES[name]):
            idle[name] = _AT_DEFAULT
        else:
            used[name] = box
    return used, idle


def _arguments(boxes: Mapping[str, Setting], family: str) -> Iterator[tuple[str, Setting]]:
    """The arguments that the boxes make (lora_gui.py:2147)."""
    yield from network(boxes, family).items()
    yield from _rates(boxes, family)
    yield from _length(boxes)
    multires = _value(boxes, "noise_offset_type") == "Multires"
    for name, box in boxes.items():
        if name in _ELSEWHERE or name in NETWORK_BOXES or (name.startswith("multires_") and not multires):
            continue
        if name in ("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale") and multires:
            continue
        yield RENAMED.get(name, name), _written(name, box)


def _written(name: str, box: Setting, value: Any = None) -> Setting:
    """A box as an argument: what the file says stays its text."""
    said = f"{name} = {box.value!r}" if box.place else f"{name} (the web interface's default)"
    return Setting(box.value if value is None else value, box.place, said if len(said) <= 80 else f"{said[:77]}...")


def _rates(boxes: Mapping[str, Setting], family: str) -> Iterator[tuple[str, Setting]]:
    """Rates, and which networks are trained: a rate of 0 leaves text encoders out (lora_gui.py:893 and 2030)."""
    text, t5, denoiser = (_number(boxes, name) for name in ("text_encoder_lr", "t5xxl_lr", "unet_lr"))
    for name in ("learning_rate", "unet_lr"):
        if name in boxes:
            yield name, _written(name, boxes[name])
    if text and family in ("flux", "sd3"):
        yield "text_encoder_lr", _written("text_encoder_lr", boxes["text_encoder_lr"], [text, t5 or text])
    elif text:
        yield "text_encoder_lr", _written("text_encoder_lr", boxes["text_encoder_lr"])
    elif denoiser:
        yield "network_train_unet_only", Setting(True, "")
    if text and not denoiser:
        yield "network_train_text_encoder_only", _written("unet_lr", Setting(0, boxes["text_encoder_lr"].place), True)


def _length(boxes: Mapping[str, Setting]) -> Iterator[tuple[str, Setting]]:
    """How long: epochs where there are no steps (lora_gui.py:1733), and a rise in percent (common_gui.py:1185)."""
    if "max_train_epochs" in boxes:
        yield "max_train_epochs", _written("max_train_epochs", boxes["max_train_epochs"])
    elif "max_train_steps" in boxes:
        yield "max_train_steps", _written("max_train_steps", boxes["max_train_steps"])
    elif "dataset_config" not in boxes and "epoch" in boxes:
        yield "max_train_epochs", _written("epoch", boxes["epoch"])
    if _number(boxes, "lr_warmup_steps") > 0:
        yield (
            "lr_warmup_steps",
            _written("lr_warmup_steps", boxes["lr_warmup_steps"], int(boxes["lr_warmup_steps"].value)),
        )
    elif _number(boxes, "lr_warmup"):
        yield "lr_warmup_steps", _written("lr_warmup", boxes["lr_warmup"], _number(boxes, "lr_warmup") / 100)


def _further(boxes: Mapping[str, Setting]) -> dict[str, Setting]:
    """The arguments that stand in a box as they are, which override the others (common_gui.py:1339)."""
    box = boxes.get("additional_parameters", Setting("", ""))
    return {
        name: Setting(_plain(value), box.place, f"additional_parameters --{name}")
        for name, value in options_of(str(box.value or "").replace('"', "").split()).items()
    }


_ELSEWHERE: Final = frozenset(
    (
        *("learning_rate", "unet_lr", "text_encoder_lr", "t5xxl_lr", "max_train_epochs", "max_train_steps", "epoch"),
        *("lr_warmup", "lr_warmup_steps", "additional_parameters", "noise_offset_type", "LoRA_type", *_MODELS),
    )
)

_LAUNCH: Final = "docs/several-gpus.md says how several GPUs are used"
_ROWS: Final[list[Row]] = [
    *(
        never(name, _LAUNCH)
        for name in (
            "num_processes@class_accelerate_launch.py:27",
            "num_machines@class_accelerate_launch.py:35",
            "multi_gpu@class_accelerate_launch.py:101",
            "gpu_ids@class_accelerate_launch.py:108",
            "main_process_port@class_accelerate_launch.py:132",
            "extra_accelerate_launch_args@class_accelerate_launch.py:142",
        )
    ),
    *needless(
        "flame-train chooses it",
        "dynamo_mode@class_accelerate_launch.py:74 dynamo_use_fullgraph@class_accelerate_launch.py:84 "
        "dynamo_use_dynamic@class_accelerate_launch.py:91 anima_compile@class_anima.py:223 "
        "anima_compile_backend@class_anima.py:237 anima_compile_mode@class_anima.py:243 "
        "anima_compile_dynamic@class_anima.py:255 anima_compile_fullgraph@class_anima.py:264 "
        "anima_compile_cache_size_limit@class_anima.py:270",
    ),
    *needless(
        "the web interface does not hand it on",
        "model_list@class_source_model.py:110 training_preset@lora_gui.py:2710 lowvram@lora_gui.py:2225 "
        "stop_text_encoder_training@lora_gui.py:1623 stop_text_encoder_training_pct@lora_gui.py:1623 "
        "no_token_padding@class_advanced_training.py:77 save_as_bool@lora_gui.py:95 use_8bit_adam@common_gui.py:381 "
        "use_wandb@common_gui.py:490",
    ),
    never("show_timesteps@class_advanced_training.py:512", "levels are in the log; sd-scripts shows them and ends"),
    *needless("it belongs to show_timesteps", "show_timesteps_resolution@class_advanced_training.py:519"),
    never("train_inpainting@lora_gui.py:2787", "no inpainting model is trained here"),
    never("anima_qwen_image_vae_2d@class_anima.py:186", "the VAE is the published one"),
]

PROGRAM: Final = Program(
    "kohya's GUI",
    is_mine,
    read,
    [*_ROWS, *(row for row in sd_scripts.PROGRAM.rows if row.key not in {own.key for own in _ROWS})],
    sd_scripts.PROGRAM.set_rows,
    "bmaltais/kohya_ss@45088f0",
)
