"""How SimpleTuner's files are laid out, and conversions that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    checkpoint,
    sampled,
    side,
    sides_of,
)
from .table import (
    NOTHING,
    Changed,
    Lost,
    Reading,
    Setting,
    Source,
    Tree,
    is_off,
    no_file,
)

_FAMILIES: Final = ("sdxl", "sd3", "flux")
_DEFAULT_MODELS: Final = {
    "sdxl": "hf:stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "hf:stabilityai/stable-diffusion-3.5-large",
    "flux": "hf:black-forest-labs/FLUX.1-dev",
}
_TARGETS: Final = {
    "all": "attention",
    "all+ffs": "attention+mlp",
    "all+ffs+embedder": "attention+mlp",
    "context+ffs": "attention+mlp",
    "ai-toolkit": "full",
}


def _plain(tree: Tree) -> dict[str, Any]:
    """The settings without dashes; a config of its web interface has them in a table of their own."""
    inner = tree.get("config")
    if isinstance(inner, Mapping) and "_metadata" in tree:
        tree = inner
    return {name.lstrip("-"): value for name, value in tree.items()}


def is_mine(tree: Tree) -> bool:
    own = ("model_family", "data_backend_config", "lora_type", "validation_prompt", "checkpoint_step_interval")
    return sum(name in _plain(tree) for name in own) >= 2


def read(reading: Reading) -> Source:
    inner = isinstance(reading.tree.get("config"), Mapping) and "_metadata" in reading.tree
    at = ("config",) if inner else ()
    written = reading.tree["config"] if inner else reading.tree
    settings = {
        name.lstrip("-"): Setting(value, reading.place((*at, name)))
        for name, value in written.items()
        if not name.startswith("_")
    }
    family = settings.get("model_family")
    if family and family.value not in _FAMILIES:
        raise ConfigError(
            f"{family.place}: model_family = {family.value}: expected sdxl, sd3 or flux; others are not here"
        )
    kind = settings.get("model_type")
    if kind and kind.value != "lora":
        raise ConfigError(f"{kind.place}: model_type = {kind.value}: expected lora; a LoRA alone is trained here")
    flavour = settings.get("model_flavour")
    if flavour and "kontext" in str(flavour.value):
        raise ConfigError(f"{flavour.place}: model_flavour = {flavour.value}: models that edit images are not here")
    if (control := settings.get("controlnet")) and control.value:
        raise ConfigError(f"{control.place}: controlnet: a ControlNet is not trained here")
    notes: list[str] = []
    _unpack_lycoris(reading, settings, notes)
    return Source(str(family.value) if family else "", settings, _backends(reading, settings, notes), notes)


def _unpack_lycoris(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> None:
    named = settings.pop("lycoris_config", None)
    if named is None or not named.value:
        return
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("lycoris_config", named, "what it holds is"))
        return
    settings |= {
        f"lycoris.{name}": setting for name, setting in other.flat(other.tree, whole=("apply_preset",)).items()
    }


def _backends(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    named = settings.pop("data_backend_config", None)
    if named is None or not named.value:
        return []
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("data_backend_config", named, "its folders are"))
        return []
    items = other.tree.get("", [])
    kinds = ("image", "", None, "eval")
    return [
        other.flat(one, ("", f"[{i}]"), whole=("conditioning",))
        for i, one in enumerate(items if isinstance(items, list) else [])
        if one.get("dataset_type", "image") in kinds and not one.get("disabled") and not one.get("disable")
    ]


def kind(value: Any, source: Source) -> Any:
    if value == "standard":
        return "dora" if source.get("use_dora") else NOTHING
    algo = str(source.get("lycoris.algo", ""))
    if not algo:
        return Lost("LyCORIS, whose config is not beside this file")
    return algo if algo in ("lora", "locon", "loha", "lokr") else Lost(f"LyCORIS' {algo} is not here")


def alpha(value: Any, source: Source) -> Any:
    return float(value if value is not None else source.get("lora_rank", 16))


def targets(value: Any, source: Source) -> Any:
    if str(source.get("lora_type", "standard")) == "lycoris":
        return ["attention"]
    return (
        [_TARGETS[value]] if value in _TARGETS else Lost("no such choice of layers here: write globs into lora.targets")
    )


def lycoris_rank(value: Any, source: Source) -> Any:
    """A rank above every layer's means matrices that are not decomposed, in LoKr."""
    if source.get("lycoris.algo") == "lokr" and value >= 4096:
        return {"lora.full_matrix": True}
    return {"lora.rank": value}


def levels(value: Any, source: Source) -> Any:
    """Sigmoid of a normal number, shifted; or uniform, or by a beta distribution."""
    shift = 0.0 if source.get("flow_schedule_auto_shift") else float(source.get("flow_schedule_shift", 3))
    if source.get("flow_use_beta_schedule"):
        return sampled("beta", shift)
    if source.get("flow_use_uniform_schedule"):
        return sampled("uniform", shift)
    return sampled("logit_normal", shift, float(source.get("flow_sigmoid_scale", 1.0)))


def quantized(value: Any, source: Source) -> Any:
    if value in ("no_change", None, ""):
        return NOTHING
    kind = str(value)
    for ours in ("int8", "fp8", "nf4"):
        if kind.startswith(ours):
            return ours
    return Changed("nf4", f"fewer than 8 bits are nf4 here, {kind} there")


def guidance(value: Any, source: Source) -> Any:
    if value != "constant":
        return Lost("loss.guidance_scale is one number")
    return float(source.get("flux_guidance_value", 1.0))


def prediction(value: Any, source: Source) -> Any:
    return {
        "epsilon": NOTHING,
        "v_prediction": "v",
        "flow_matching": NOTHING if source.family != "sdxl" else "flow",
    }.get(value, Lost("epsilon, v and flow are here"))


def loss(value: Any, source: Source) -> Any:
    return {"l2": NOTHING, "huber": "huber", "smooth_l1": "smooth_l1"}.get(value, Lost("no such loss here"))


def clip(value: Any, source: Source) -> Any:
    """max_grad_norm is the largest norm or the largest value, as grad_clip_method says."""
    name = "gradient.clip_value" if source.get("grad_clip_method", "value") == "value" else "gradient.clip_norm"
    return {name: float(value)} | ({"gradient.clip_norm": 0.0} if name.endswith("value") else {})


def steps(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else value


def sizes(value: Any, source: Source) -> Any:
    sides = sides_of(str(value).split(",")[0] if "x" in str(value) else value)
    if not sides:
        return Lost("expected a size such as 1024x1024")
    return {"sample.width": sides[0], "sample.height": sides[-1] if len(sides) < 3 else sides[0]}


def base_model(value: Any, source: Source) -> Any:
    if value:
        return checkpoint(value, source)
    default = _DEFAULT_MODELS.get(source.family)
    return Changed(default, "SimpleTuner's own choice for this family") if default else NOTHING


def resolution(value: Any, source: Source) -> Any:
    """Pixels, or megapixels of an area."""
    if isinstance(value, int | float) and value < 64:
        return round((value * 1e6) ** 0.5 / 64) * 64
    return side(value, source)


def folder(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else value


def not_local(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if value == "local"
        else Lost(f"images from {value}: download them into a folder, and name it in data.path")
    )


def strategy(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if value in ("textfile", "instanceprompt", "instance_prompt")
        else Lost("captions stand in text files or metadata.jsonl here")
    )


def negative(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    if source.family == "flux":
        return Lost("Flux has no negative prompt")
    if source.get("validation_guidance") == 1:
        return Lost("with a guidance of 1 no model sees it")
    return value
