"""sd-scripts' networks and what trains them: which adapter on which layers, with which ranks, optimizer and rates.

Places are in kohya-ss/sd-scripts, but for `kohya.py` and `config.py`, which are KohakuBlueleaf/LyCORIS'.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Final

from .conversions import number, to_float, trained, warmup
from .conversions import optimizer as optimizer_by_name
from .conversions import schedule as by_name
from .table import NOTHING, Changed, Lost, Source, is_off

ENCODER_RATES: Final = ("text_encoder_lr", "text_encoder_lr1", "text_encoder_lr2", "text_encoder_lr3")
_PLAIN: Final = ("lora", "lora_sdxl", "lora_flux", "lora_sd3", "lora_anima")
_NATIVE: Final = ("loha", "lokr")
_MOST: Final = 4096
"""The highest rank that `lora.rank` takes."""
_KERNELS: Final = ("*.in_layers.2", "*.out_layers.3", "*.op", "output_blocks.*.conv")
"""SDXL's convolutions larger than 1x1, inside the numbered blocks."""
_UNET: Final = ("attention+mlp", "*.proj_in", "*.proj_out")
_ENCODER_LAYERS: Final = MappingProxyType({"attn-only": "attention"})
_PRESETS: Final = MappingProxyType(
    {
        "full": ("full",),
        "full-lin": (*_UNET, "*.emb_layers.1"),
        "attn-mlp": _UNET,
        "attn-only": ("attention",),
        "unet-only": ("full",),
        "unet-transformer-only": _UNET,
        "unet-convblock-only": ("*.emb_layers.1", "*.skip_connection", *_KERNELS),
    }
)
"""LyCORIS' presets on SDXL (config.py:1): a transformer's projections in and out are linear layers of it."""
_FLUX_ATTENTION: Final = ("double_blocks.*_attn.qkv", "double_blocks.*_attn.proj")
_FLUX_TYPES: Final = MappingProxyType(
    {
        "img_attn_dim": ("double_blocks.*.img_attn.*",),
        "txt_attn_dim": ("double_blocks.*.txt_attn.*",),
        "img_mlp_dim": ("double_blocks.*.img_mlp.*",),
        "txt_mlp_dim": ("double_blocks.*.txt_mlp.*",),
        "img_mod_dim": ("double_blocks.*.img_mod.*",),
        "txt_mod_dim": ("double_blocks.*.txt_mod.*",),
        "single_dim": ("single_blocks.*.linear[12]",),
        "single_mod_dim": ("single_blocks.*.modulation.*",),
    }
)
"""networks/lora_flux.py:466: ranks of a block's parts; 0 leaves a part out."""


def module(source: Source) -> str:
    """Returns `network_module` without its package: lora_flux, lokr, lycoris."""
    text = str(source.get("network_module", ""))
    return "lycoris" if text.startswith("lycoris") else text.removeprefix("networks.")


def argument(source: Source, name: str, default: Any = None) -> Any:
    """Returns one of `network_args`."""
    return source.get(f"network_args.{name}", default)


def is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def algorithm(source: Source) -> str:
    """Returns LyCORIS' algorithm, or that of a module of its own."""
    own = module(source)
    if own in _NATIVE:
        return own
    return str(argument(source, "algo", None) or "lora").lower() if own == "lycoris" else "lora"


def kind(value: Any, source: Source) -> Any:
    own, algo = module(source), algorithm(source)
    if own in _PLAIN:
        return "locon" if _has_kernels(source) else NOTHING
    if own not in ("lycoris", *_NATIVE):
        return Lost(f"no such adapter here: {value}; there are lora, locon, dora, loha and lokr")
    if is_on(argument(source, "dora_wd")):
        return "dora" if algo in ("lora", "locon") else Lost(f"DoRA with {algo} is not here")
    if algo in ("loha", "lokr"):
        return algo
    if algo not in ("lora", "locon"):
        return Lost(f"LyCORIS' {algo} is not here; there are lora, locon, dora, loha and lokr")
    return "locon" if _has_kernels(source) else NOTHING


def _has_kernels(source: Source) -> bool:
    """Says whether convolutions larger than 1x1 of SDXL get an adapter."""
    if not source.fact("unet"):
        return False
    if module(source) == "lycoris":  # kohya.py:42, kohya.py:337
        return str(argument(source, "preset", "full")) in ("full", "unet-only", "unet-convblock-only")
    return not is_off(number(argument(source, "conv_dim")))  # networks/lora.py:435


def kernels(value: Any, source: Source) -> Any:
    """Returns rank and alpha of a LoCon's larger kernels: LyCORIS has the linear layers' where none are given."""
    if not _has_kernels(source) or algorithm(source) not in ("lora", "locon") or is_on(argument(source, "dora_wd")):
        return NOTHING
    rank, alpha = _of_kernels(source)
    return {"lora.conv_rank": rank, "lora.conv_alpha": alpha}


def _of_kernels(source: Source) -> tuple[Any, float]:
    ranks, alphas = number(argument(source, "conv_dim")), number(argument(source, "conv_alpha"))
    if module(source) == "lycoris":
        return ranks or number(source.get("network_dim")) or 4, float(alphas or number(source.get("network_alpha", 1)))
    return ranks, float(1 if alphas is None else alphas)


def targets(value: Any, source: Source) -> Any:
    """Converts the layers: every linear one of the blocks, or what LyCORIS' preset says."""
    if module(source) == "lycoris":
        return _preset(str(argument(source, "preset", "full")), source)
    if source.fact("unet"):
        return ["full"] if _has_kernels(source) else list(_UNET)
    if layers := source.fact("sd_scripts_layers"):
        return layers
    blocks = str(argument(source, "train_blocks", "all")) if source.fact("double_blocks") else "all"
    return {"double": ["double_blocks.*"], "single": ["single_blocks.*"]}.get(blocks, ["full"])


def _preset(name: str, source: Source) -> Any:
    if name not in _PRESETS:
        return Lost(f"LyCORIS' preset {name}: list the layers in lora.targets")
    if source.fact("unet"):
        return list(_PRESETS[name])
    if name == "attn-only":
        return list(_FLUX_ATTENTION) if source.fact("double_blocks") else ["attention"]
    return ["full"] if name != "unet-convblock-only" else Lost("this family has no convolutions")


def encoders(value: Any, source: Source) -> Any:
    """CLIPs are trained unless --network_train_unet_only, T5 with train_t5xxl; their rate is --learning_rate if unset.

    One rate is for all, a list has one for each; a rate of 0 trains none. LyCORIS' presets unet-* adapt none.
    """
    rates = _encoder_rates(source)
    if not rates:
        return NOTHING
    layers = _ENCODER_LAYERS.get(str(argument(source, "preset", "")), "attention+mlp")
    answer = trained(rates, source.get("unet_lr") or source.get("learning_rate", 2e-6), layers)
    return answer.value if isinstance(answer, Changed) else answer  # `rules` has the rates that differ


def _encoder_rates(source: Source) -> dict[str, Any]:
    only = not is_off(source.get("network_train_unet_only")) or not is_off(
        source.get("network_train_text_encoder_only")
    )
    if only or str(argument(source, "preset", "")).startswith("unet-"):
        return {}
    given, usual = source.get("text_encoder_lr"), source.get("learning_rate", 2e-6)
    listed = given if isinstance(given, list) else str(given).split() if isinstance(given, str) else [given]
    listed = [usual if each in (None, "") else number(each) for each in listed or [None]]
    names = source.fact("encoders") or ()
    rates = {name: listed[min(i, len(listed) - 1)] for i, name in enumerate(names)}
    for name, single in zip(names, ENCODER_RATES[1:], strict=False):
        rates[name] = source.get(single, rates[name])
    if not is_on(argument(source, "train_t5xxl")):
        rates.pop("t5", None)
    return {name: float(number(rate)) for name, rate in rates.items() if not is_off(number(rate))}


def rules(value: Any, source: Source) -> Any:
    """Converts the rules of layers that have a rank or rate of their own, or none."""
    every_rule = [*_rules_of_encoders(source), *_rules_of_blocks(source), *_rules_of_kernels(source)]
    if not every_rule:
        return NOTHING
    several = len(set(_encoder_rates(source).values())) > 1
    if several and source.fact("unet") and source.get("text_encoder_lr2") is None:
        return Changed(
            every_rule, "of a list sd-scripts' SDXL takes the first rate for both encoders (train_network.py:741)"
        )
    return every_rule


def _rules_of_encoders(source: Source) -> Iterator[dict[str, Any]]:
    rates = _encoder_rates(source)
    shared = next(iter(rates.values()), None)
    for name, rate in rates.items():
        if rate != shared:
            yield {"match": [f"{name}.*"], "lr": rate}


def _rules_of_kernels(source: Source) -> Iterator[dict[str, Any]]:
    """Yields the kernels of LoHa and LoKr, whose rank is not that of the linear layers."""
    if _has_kernels(source) and (algorithm(source) in _NATIVE or is_on(argument(source, "dora_wd"))):
        usual = (number(source.get("network_dim")) or 4, float(number(source.get("network_alpha", 1))))
        if _of_kernels(source) != usual and _of_kernels(source)[0] <= _MOST:
            rank, alpha = _of_kernels(source)
            yield {"match": list(_KERNELS), "rank": rank, "alpha": alpha}


def _rules_of_blocks(source: Source) -> Iterator[dict[str, Any]]:
    """Yields Flux' ranks of a block's parts, and blocks that get no adapter (networks/lora_flux.py:466 and 540)."""
    if not source.fact("double_blocks") or module(source) != "lora_flux":
        return
    for name, match in _FLUX_TYPES.items():
        rank = number(argument(source, name))
        if isinstance(rank, int):
            yield {"match": list(match)} | ({"rank": rank} if rank else {"off": True})
    trained_blocks = str(argument(source, "train_blocks", "all"))
    for part, count in (("double", 19), ("single", 38)):
        chosen = argument(source, f"train_{part}_block_indices")
        if chosen not in (None, "", "all") and trained_blocks in ("all", part):
            adapted = _indices(str(chosen))
            yield {"match": [f"{part}_blocks.{i}.*" for i in range(count) if i not in adapted], "off": True}


def _indices(text: str) -> set[int]:
    """Returns the numbers in 0-3,7."""
    indices: set[int] = set()
    for part in text.split(",") if text != "none" else ():
        first, _, last = part.partition("-")
        indices |= set(range(int(first), int(last or first) + 1))
    return indices


def lora_plus(value: Any, source: Source) -> Any:
    """Converts one ratio for all here. The denoiser's own is the one that counts."""
    general = argument(source, "loraplus_lr_ratio")
    ratio = argument(source, "loraplus_unet_lr_ratio") or general
    others = argument(source, "loraplus_text_encoder_lr_ratio") or general
    if is_off(number(ratio)):
        return Lost("optimizer.lora_plus_ratio holds for the denoiser too") if not is_off(number(others)) else NOTHING
    if _encoder_rates(source) and number(others) != number(ratio):
        return Changed(float(number(ratio)), f"text encoders have {others or 1} there, and the same here")
    return float(number(ratio))


def merged_first(value: Any, source: Source) -> Any:
    """Returns LoRAs that are merged into the base model before training (train_network.py:651)."""
    if is_off(value):
        return NOTHING
    files = value if isinstance(value, list) else [value]
    factor = source.get("base_weights_multiplier")
    factors = [number(each) for each in (factor if isinstance(factor, list) else [factor])]
    if len(files) > 1:
        return Lost("merge them into the checkpoint with `flame-train merge`, and train on that")
    strength = 1.0 if factors[0] is None else float(factors[0])
    if strength == 0:
        return NOTHING
    if not 0 < strength <= 2:
        return Lost("with such a factor merge it with `flame-train merge`, and train on that")
    keys = {"model.training_adapter": files[0]}
    keys |= {} if factors[0] is None else {"model.training_adapter_strength": strength}
    return Changed(keys, "merged into the base model there, added to it while it is trained here")


def rank(value: Any, source: Source) -> Any:
    """Converts a LoKr of a rank that no layer has is one of whole matrices (lycoris/modules/lokr.py:102)."""
    rank = number(value) or 4
    if rank > _MOST and algorithm(source) == "lokr":
        return Changed({"lora.full_matrix": True}, "no layer has that rank, so its matrices are whole")
    return rank


def alpha(value: Any, source: Source) -> Any:
    """Converts alpha; 0 is the rank, as for LyCORIS (networks/lora.py:62)."""
    alpha = number(value)
    return float(1 if alpha in (None, "") else alpha or number(source.get("network_dim")) or 4)


def on_output(value: Any, source: Source) -> Any:
    return NOTHING if kind(source.get("network_module"), source) != "dora" else is_on(value)


def schedule(value: Any, source: Source) -> Any:
    """Converts --lr_scheduler. A schedule-free optimizer has none, and Adafactor's relative steps have their own."""
    if _by_itself(source):
        return "constant"
    if not is_off(source.get("lr_scheduler_type")):
        return NOTHING
    name, cycles = str(value).lower(), number(source.get("lr_scheduler_num_cycles", 1))
    if name == "cosine_with_min_lr" and cycles not in (1, None, ""):
        return Changed("cosine", "", (f"lr_scheduler_num_cycles = {cycles}: it falls once here",))
    return {"adafactor": "constant", "cosine_with_min_lr": "cosine"}.get(name) or by_name(name, source)


def rise(value: Any, source: Source) -> Any:
    """Converts --lr_warmup_steps: a float is a share of the run (train_util.py:5276)."""
    return NOTHING if _by_itself(source) else warmup(value, source)


def decay(value: Any, source: Source) -> Any:
    """Converts --lr_decay_steps, which warmup_stable_decay alone has; a float is a share of the run."""
    steps, length = number(value), number(source.get("max_train_steps", 1600))
    if is_off(steps) or source.get("lr_scheduler") != "warmup_stable_decay":
        return NOTHING
    if isinstance(steps, float):
        return steps
    if not is_off(number(source.get("max_train_epochs"))):
        return Lost("schedule.decay is a share of the run, and no number of steps: divide by its steps")
    return Changed(round(steps / length, 6), f"a share of {length} steps")


def _by_itself(source: Source) -> bool:
    """Says whether the optimizer needs no schedule (train_util.py:5239 and 5082)."""
    name = str(source.get("optimizer_type", "")).lower()
    relative = source.get("optimizer_args.relative_step", True) or source.get("optimizer_args.warmup_init")
    return name.endswith("schedulefree") or (name == "adafactor" and not is_off(relative))


def least_rate(value: Any, source: Source) -> Any:
    """Converts --lr_scheduler_min_lr_ratio, which two schedules read."""
    ratio, peak = number(value), number(source.get("unet_lr") or source.get("learning_rate") or 0)
    if is_off(ratio) or source.get("lr_scheduler") not in ("cosine_with_min_lr", "warmup_stable_decay"):
        return NOTHING
    return Changed(float(ratio) * float(peak), "a rate here, and no ratio")


def optimizer(value: Any, source: Source) -> Any:
    """Converts --optimizer_type, with the defaults of its own that ours do not share (train_util.py:4822)."""
    name = str(value or "AdamW").rsplit(".", 1)[-1].lower()
    arguments = {key for key in source.settings if key.startswith("optimizer_args.")}

    def lacking(**usual: Any) -> dict[str, Any]:
        return {f"optimizer.{key}": each for key, each in usual.items() if f"optimizer_args.{key}" not in arguments}

    if name == "adafactor":
        relative = not is_off(source.get("optimizer_args.warmup_init"))
        own = {"optimizer.relative_step": True} if relative else lacking(relative_step=True)
        return {"optimizer.name": "adafactor"} | own | lacking(scale_parameter=True)
    if name in ("sgdnesterov", "sgdnesterov8bit"):
        return {"optimizer.name": "sgd", "optimizer.nesterov": True} | lacking(momentum=0.9, weight_decay=0.0)
    if name in ("adam", "sgd"):
        keys = {"optimizer.name": {"adam": "adamw"}.get(name, name)} | lacking(weight_decay=0.0)
        return Changed(keys, "the nearest to Adam here") if name == "adam" else keys
    if name in ("pagedadamw", "pagedadamw32bit"):
        return "adamw"
    return optimizer_by_name(value, source)


def decoupled(value: Any, source: Source) -> Any:
    """Prodigy's switch: here decay is always decoupled from the gradient; without decay there is nothing to couple."""
    if value is True or is_off(number(source.get("optimizer_args.weight_decay"))):
        return NOTHING
    return Lost("weight decay is always decoupled here")


def usual_rate(value: Any, source: Source) -> Any:
    """Converts --learning_rate, the denoiser's where it has none of its own."""
    return NOTHING if not is_off(number(source.get("unet_lr"))) else rate(value, source)


def rate(value: Any, source: Source) -> Any:
    """Converts the rate of the denoiser; Adafactor's relative steps leave it out (train_util.py:5060)."""
    name = str(source.get("optimizer_type", "")).lower()
    return 1.0 if name == "adafactor" and _by_itself(source) else to_float(value, source)
