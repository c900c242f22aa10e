"""The JSON that kohya's web interface saves (bmaltais/kohya_ss): its names for what it then tells sd-scripts.

`read` does what the interface's `train_model` does (lora_gui.py:2147): it makes arguments of sd-scripts of the boxes.
The tables of sd-scripts carry these over. A box that is at its default has no line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from flame_train.config.command_line import options_of
from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import sd_scripts
from .conversions import number
from .kohya_files import datasets_of, source_of
from .table import Program, Reading, Setting, Source, Table, Tree, facts_of

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


class InterfaceBoxes(NamedTuple):
    """What the interface has of boxes.

    Attributes:
        at_default: values with which sd-scripts, and flame-train with it, do what they do without the box.
        defaults: those that sd-scripts does not share.
        renamed: names in sd-scripts.
        of_models: families for which alone a box is read, by its name or the name's beginning.
    """

    at_default: Mapping[str, Any]
    defaults: Mapping[str, Any]
    renamed: Mapping[str, str]
    of_models: Mapping[str, Collection[str]]


@cache
def interface_boxes() -> InterfaceBoxes:
    """Returns the boxes in the file beside this one."""
    tree = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    models = named_by("sd-scripts") | sd_scripts.TYPES | {"": ""}
    groups = [(each["names"].split(), [models[model] for model in each["models"]]) for each in tree["of_models"]]
    of_models = {name: families for names, families in groups for name in names}
    return InterfaceBoxes(tree["boxes_at_default"], tree["defaults"], tree["renamed"], of_models)


def is_mine(tree: Tree) -> bool:
    """The kind of adapter by the interface's name, or several of its boxes with a name that sd-scripts has not."""
    return "LoRA_type" in tree or (sum(name in tree for name in _MARKS) >= 3 and "network_module" not in tree)


def read(reading: Reading) -> Source:
    boxes = {name: Setting(_plain(one.value), one.place) for name, one in reading.flat(reading.tree).items()}
    family = _family(reading, boxes) or reading.family
    needed, idle = _used(boxes, family)
    defaults = interface_boxes().defaults
    absent = {
        name for name in defaults if _value(boxes, name, "") == "" and (name not in boxes or name in _NEVER_EMPTY)
    }
    absent |= {name for name in defaults if name in boxes and boxes[name].value is None}
    boxes_read = needed | {name: Setting(defaults[name], "") for name in absent}
    idle |= dict.fromkeys(unread(boxes_read), _OTHER_KIND)
    settings = dict(_arguments(boxes_read, family))
    settings |= _further(boxes)
    written = {one.written.partition(" ")[0] for one in settings.values()}
    idle |= {
        name: _MODEL if name in _MODELS else _UNSAID for name in needed if name not in written and name not in idle
    }
    notes: list[str] = []
    sets = datasets_of(reading, settings, notes)
    return replace(source_of(family, settings, sets, notes, reading.folder), idle=idle)


def _plain(value: Any) -> Any:
    """Returns a number for text that spells one, as the interface reads it (common_gui.py:390)."""
    return number(value) if isinstance(value, str) and value.strip() else value


def _family(reading: Reading, boxes: Mapping[str, Setting]) -> str:
    """Returns the box that is ticked; without any it is Stable Diffusion 1 or 2 (lora_gui.py:1778)."""
    if not {"LoRA_type", "network_dim"} & set(boxes):
        raise ConfigError(f"{reading.file}: expected a LoRA, got a config of another page of the interface")
    for name, other in _OTHERS.items():
        if name in boxes and boxes[name].value:
            raise ConfigError(f"{boxes[name].place}: {name}: no such family here: {other}")
    for name, family in _MODELS.items():
        if name in boxes and boxes[name].value:
            chroma = name == "flux1_checkbox" and _value(boxes, "model_type") == "chroma"
            return sd_scripts.TYPES["chroma"] if chroma else family
    return _MODELS["v2"] if "sdxl" in boxes and not reading.family else ""


def _value(boxes: Mapping[str, Setting], name: str, usual: Any = None) -> Any:
    return boxes[name].value if name in boxes and boxes[name].value not in ("", None) else usual


def _number(boxes: Mapping[str, Setting], name: str) -> float:
    """Returns a box's number; 0 for one that has none, as the interface takes it (common_gui.py:1205)."""
    value = _value(boxes, name, 0)
    return value if isinstance(value, int | float) else 0


def _used(boxes: Mapping[str, Setting], family: str) -> tuple[dict[str, Setting], dict[str, str]]:
    """Returns the boxes that say something, and of the others the reason why they do not."""
    used: dict[str, Setting] = {}
    idle: dict[str, str] = {}
    of_models, at_default = interface_boxes().of_models, interface_boxes().at_default
    for name, box in boxes.items():
        models = of_models.get(name) or next((own for start, own in of_models.items() if name.startswith(start)), ())
        if models and family not in models:
            idle[name] = _NO_MODEL
        elif box.value in ("", False, None, []) or (name in at_default and box.value == at_default[name]):
            idle[name] = _AT_DEFAULT
        else:
            used[name] = box
    return used, idle


def _arguments(boxes: Mapping[str, Setting], family: str) -> Iterator[tuple[str, Setting]]:
    yield from network(boxes, family).items()
    yield from _rates(boxes, family)
    yield from _length(boxes)
    multires = _value(boxes, "noise_offset_type") == "Multires"
    for name, box in boxes.items():
        if name in _ELSEWHERE or name in NETWORK_BOXES or (name.startswith("multires_") and not multires):
            continue
        if name in ("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale") and multires:
            continue
        yield interface_boxes().renamed.get(name, name), _written(name, box)


def _written(name: str, box: Setting, value: Any = None) -> Setting:
    """Returns a box as an argument: what the file says stays its text."""
    text = f"{name} = {box.value!r}" if box.place else f"{name} (the web interface's default)"
    return Setting(box.value if value is None else value, box.place, text if len(text) <= 80 else f"{text[:77]}...")


def _rates(boxes: Mapping[str, Setting], family: str) -> Iterator[tuple[str, Setting]]:
    """Rates, and which networks are trained: a rate of 0 leaves text encoders out (lora_gui.py:893 and 2030)."""
    text, t5, denoiser = (_number(boxes, name) for name in ("text_encoder_lr", "t5xxl_lr", "unet_lr"))
    for name in ("learning_rate", "unet_lr"):
        if name in boxes:
            yield name, _written(name, boxes[name])
    if text and "t5" in facts_of(family).get("encoders", ()):
        yield "text_encoder_lr", _written("text_encoder_lr", boxes["text_encoder_lr"], [text, t5 or text])
    elif text:
        yield "text_encoder_lr", _written("text_encoder_lr", boxes["text_encoder_lr"])
    elif denoiser:
        yield "network_train_unet_only", Setting(True, "")
    if text and not denoiser:
        yield "network_train_text_encoder_only", _written("unet_lr", Setting(0, boxes["text_encoder_lr"].place), True)


def _length(boxes: Mapping[str, Setting]) -> Iterator[tuple[str, Setting]]:
    """Says how long: epochs where there are no steps (lora_gui.py:1733), and a rise in percent (common_gui.py:1185)."""
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
    """Returns the arguments that stand in a box as they are, which override the others (common_gui.py:1339)."""
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


_KERNELS: Final = ("conv_dim", "conv_alpha")
_DROPOUT: Final = ("rank_dropout", "module_dropout")
_LYCORIS: Final = ("LyCORIS_preset", *_KERNELS)
_WHOLE: Final = (*_LYCORIS, *_DROPOUT, "use_tucker", "rank_dropout_scale", "train_norm")
_DORA: Final = (*_WHOLE, "bypass_mode", "dora_wd", "use_scalar")
_BLOCKS: Final = (
    *("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"),
    *("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas", *_DROPOUT),
)
_FLUX: Final = (
    *("img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim", "txt_mlp_dim", "txt_mod_dim"),
    *("single_mod_dim", "in_dims", "train_double_block_indices", "train_single_block_indices"),
    *("split_qkv", "train_t5xxl", *_DROPOUT),
)
_NATIVE: Final = (*_KERNELS, *_DROPOUT, "use_tucker")

KINDS: Final = MappingProxyType(
    {
        "Standard": ("networks.lora", "", _BLOCKS),
        "Kohya LoCon": ("networks.lora", "", (*_KERNELS, *_BLOCKS)),
        "LoRA-FA": ("networks.lora_fa", "", _BLOCKS),
        "Kohya DyLoRA": ("networks.dylora", "", (*_KERNELS, *_BLOCKS, "unit")),
        "Kohya LoHa": ("networks.loha", "", _NATIVE),
        "Kohya LoKr": ("networks.lokr", "", (*_NATIVE, "factor")),
        "Flux1": ("networks.lora_flux", "", _FLUX),
        "Flux1 OFT": ("networks.oft_flux", "", ("enable_all_linear",)),
        "Anima": ("networks.lora_anima", "", _DROPOUT),
        "LoCon": ("lycoris.kohya", "locon", _DORA),
        "LyCORIS/LoCon": ("lycoris.kohya", "locon", _DORA),
        "LyCORIS/LoHa": ("lycoris.kohya", "loha", _DORA),
        "LyCORIS/LoKr": ("lycoris.kohya", "lokr", (*_DORA, "factor", "use_cp", "decompose_both")),
        "LyCORIS/BOFT": ("lycoris.kohya", "boft", _WHOLE),
        "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft", (*_WHOLE, "constrain", "rescaled")),
        "LyCORIS/DyLoRA": ("lycoris.kohya", "dylora", (*_LYCORIS, *_DROPOUT, "use_tucker", "unit", "train_norm")),
        "LyCORIS/GLoRA": ("lycoris.kohya", "glora", _WHOLE),
        "LyCORIS/iA3": ("lycoris.kohya", "ia3", (*_LYCORIS, "train_on_input")),
        "LyCORIS/Native Fine-Tuning": (
            "lycoris.kohya",
            "full",
            ("LyCORIS_preset", *_DROPOUT, "rank_dropout_scale", "train_norm"),
        ),
    }
)
"""By the name in `LoRA_type`: module, LyCORIS' algorithm and the boxes that are read (lora_gui.py:1823)."""

_ALL_KINDS: Final = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
_GGPO: Final = ("train_lora_ggpo", "ggpo_sigma", "ggpo_beta")
_NAMES: Final = MappingProxyType({"LyCORIS_preset": "preset", "unit": "block_size", "constrain": "constraint"})
NETWORK_BOXES: Final = frozenset(
    name for _, _, boxes in KINDS.values() for name in (*boxes, *_ALL_KINDS, *_GGPO, "train_blocks", "LoRA_type")
)


def network(boxes: Mapping[str, Setting], family: str) -> dict[str, Setting]:
    """`network_module` and the `network_args` of a kind; a kind that the table lacks is a module of its name."""
    box = boxes["LoRA_type"]
    text = f"LoRA_type = {box.value!r}" if box.place else "LoRA_type (the web interface's default)"
    module, algorithm, read = KINDS.get(str(box.value), (str(box.value), "", ()))
    if module == "networks.lora":
        module = facts_of(family).get("kohya_network", module)
    arguments = {"network_module": Setting(module, box.place, text)}
    if algorithm:
        arguments["network_args.algo"] = Setting(algorithm, box.place, text)
    if "split_mode" in boxes and "split_qkv" in read:
        arguments["network_args.train_blocks"] = Setting("single", boxes["split_mode"].place, "split_mode = True")
    for name in (*read, *_ALL_KINDS, *(_GGPO[1:] if "train_lora_ggpo" in boxes and "split_qkv" in read else ())):
        if name in boxes:
            own = boxes[name]
            arguments[f"network_args.{_NAMES.get(name, name)}"] = Setting(
                own.value, own.place, f"{name} = {own.value!r}"
            )
    return arguments


def unread(boxes: Mapping[str, Setting]) -> frozenset[str]:
    """Returns the boxes of other kinds, which the interface does not read."""
    read = KINDS.get(str(boxes["LoRA_type"].value), ("", "", ()))[2]
    others = NETWORK_BOXES - {*read, *_ALL_KINDS, "LoRA_type"}
    if "split_qkv" in read and "train_lora_ggpo" in boxes:
        others -= set(_GGPO)
    return frozenset(name for name in others if name in boxes and boxes[name].place)


@cache
def _table() -> Table:
    own, theirs = read_table("kohya_gui", "sd-scripts"), sd_scripts.PROGRAM.table()
    names = {row.key for row in own.rows}
    return Table([*own.rows, *(row for row in theirs.rows if row.key not in names)], theirs.set_rows)


PROGRAM: Final = Program("kohya's GUI", is_mine, read, _table, "bmaltais/kohya_ss@45088f0")
