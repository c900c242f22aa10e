"""The kinds of adapter of kohya's web interface as networks of sd-scripts, with the boxes that each kind reads.

Places are in bmaltais/kohya_ss, `kohya_gui/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .table import Setting

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
    said = f"LoRA_type = {box.value!r}" if box.place else "LoRA_type (the web interface's default)"
    module, algorithm, read = KINDS.get(str(box.value), (str(box.value), "", ()))
    if module == "networks.lora" and family == "sd3":
        module = "networks.lora_sd3"
    found = {"network_module": Setting(module, box.place, said)}
    if algorithm:
        found["network_args.algo"] = Setting(algorithm, box.place, said)
    if "split_mode" in boxes and "split_qkv" in read:
        found["network_args.train_blocks"] = Setting("single", boxes["split_mode"].place, "split_mode = True")
    for name in (*read, *_ALL_KINDS, *(_GGPO[1:] if "train_lora_ggpo" in boxes and "split_qkv" in read else ())):
        if name in boxes:
            own = boxes[name]
            found[f"network_args.{_NAMES.get(name, name)}"] = Setting(own.value, own.place, f"{name} = {own.value!r}")
    return found


def unread(boxes: Mapping[str, Setting]) -> frozenset[str]:
    """The boxes of other kinds, which the interface does not read."""
    read = KINDS.get(str(boxes["LoRA_type"].value), ("", "", ()))[2]
    others = NETWORK_BOXES - {*read, *_ALL_KINDS, "LoRA_type"}
    if "split_qkv" in read and "train_lora_ggpo" in boxes:
        others -= set(_GGPO)
    return frozenset(name for name in others if name in boxes and boxes[name].place)
