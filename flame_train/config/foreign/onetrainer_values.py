"""Conversions that are OneTrainer's own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .conversions import format_of_comfyui, number, sampled, schedule, side, sides_of, trained
from .table import NOTHING, Changed, Convert, Lost, Nothing, Source, is_off

_EIGHT_BITS: Final = ("FLOAT_8", "INT_8", "FLOAT_W8A8", "INT_W8A8", "FLOAT_W8A8_COMPRESSED", "INT_W8A8_COMPRESSED")
_WIDE: Final = (None, "", "NONE", "FLOAT_16", "BFLOAT_16", "FLOAT_32", "TFLOAT_32")


def weights(value: Any, source: Source) -> Any:
    if value in _EIGHT_BITS:
        kind = "int8" if str(value).startswith("INT") else "fp8"
        if "W8A8" not in str(value):
            return kind
        return Changed(kind, f'products in 8 bits, as there, are model.arithmetic = "{kind}"')
    if value == "NFLOAT_4":
        return "nf4"
    if str(value).startswith("GGUF"):
        return Changed("nf4", f"a GGUF file is unpacked when it is read, and kept in nf4; {value} there")
    return NOTHING if value in _WIDE else Lost(f"no such number format here: {value}")


def kind(value: Any, source: Source) -> Any:
    if value == "LORA":
        return "dora" if source.get("lora_decompose") else ("locon" if _convolutions(source) else NOTHING)
    known = {"LOHA": "loha", "LOKR": "lokr"}
    return known.get(value, Lost(f"no such adapter here: {value}"))


def text_weights(value: Any, source: Source) -> Any:
    """Converts the numbers of the large text encoder."""
    known = {"FLOAT_32": "fp32", "BFLOAT_16": "bf16", "FLOAT_16": "fp16"}
    answer = known.get(value) or weights(value, source)
    if isinstance(answer, Changed) and answer.value != "nf4":
        return Changed(answer.value, "their products are in 16 bits here")
    return answer


def norm_epsilon(value: Any, source: Source) -> Any:
    if value or not source.get("lora_decompose"):
        return NOTHING
    return Lost("the norm of DoRA has a small number added, always")


def scheduled(value: Any, source: Source) -> Any:
    """Converts a schedule; REX has d = 0.9 there, and restarts go down and up again."""
    named = float(number(source.get("learning_rate_cycles", 1)))
    cycles = max(1, round(named))
    reasons = () if named == cycles else (f"learning_rate_cycles = {named:g}: cycles are whole here",)
    if value == "REX":
        return {"schedule.name": "rex", "schedule.rex_d": 0.9}
    if value == "COSINE_WITH_HARD_RESTARTS":
        return Changed({"schedule.name": "cosine_restarts", "schedule.cycles": cycles}, "", reasons)
    if value == "COSINE_WITH_RESTARTS":
        reason = "the rate falls and rises along a cosine there, and begins anew at once here"
        return Changed(
            {"schedule.name": "cosine_restarts", "schedule.cycles": cycles}, "the nearest here", (reason, *reasons)
        )
    return schedule(value, source)


def least(value: Any, source: Source) -> Any:
    """Converts the lowest rate, of schedules that fall."""
    if is_off(value) or source.get("learning_rate_scheduler", "CONSTANT") in ("CONSTANT", "ADAFACTOR", "CUSTOM"):
        return NOTHING
    return Changed(float(value) * float(source.get("learning_rate", 3e-6)), "a rate here, and no factor")


def tokens(*choices: int) -> Convert:
    """Returns the length of captions for a text encoder."""

    def convert(value: Any, source: Source) -> Any:
        if value is None:
            return NOTHING
        return value if value in choices else Lost(f"expected one of {', '.join(map(str, choices))}")

    return convert


def _convolutions(source: Source) -> bool:
    return source.fact("unet") and source.get("layer_filter_preset", "full") == "full"


_LAYERS: Final = MappingProxyType(
    {"attn-only": "attention", "attn-mlp": "attention+mlp", "full": "full", "blocks": "full"}
)


def targets(value: Any, source: Source) -> Any:
    if value == "custom":
        kind = "expressions" if source.get("layer_filter_regex") else "parts of names"
        return Lost(f"{kind} ({source.get('layer_filter', '')}): write the globs into lora.targets")
    if value not in _LAYERS:
        return Lost("no such preset here: write the globs into lora.targets")
    if source.fact("unet") and value == "attn-mlp":
        return ["attention+mlp", "*.proj_in", "*.proj_out"]
    if value == "full":
        return Changed(["full"], "without the layers outside the blocks")
    return [_LAYERS[value]]


def rate(value: Any, source: Source) -> Any:
    """Converts a rate with its factor, and a remark where there is one."""
    factor = _factor(source)
    if factor == 1:
        return float(value)
    remark = f"multiplied by the root of {factor}, as learning_rate_scaler = {source.get('learning_rate_scaler')} does"
    return Changed(float(value) * factor**0.5, remark)


def _factor(source: Source) -> int:
    """Multiplies rates by the root of batch size or accumulation, where the config asks for it."""
    batch, accumulation = source.get("batch_size", 1), source.get("gradient_accumulation_steps", 1)
    known = {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulation, "BOTH": batch * accumulation}
    factor: int = known.get(str(source.get("learning_rate_scaler", "NONE")).removeprefix("GLOBAL_"), 1)
    return factor


def encoders(value: Any, source: Source) -> Any:
    """Converts the text encoders whose part says so, each at its own rate or the one of all."""
    shared = source.get("learning_rate", 3e-6)
    denoiser = source.get("unet.learning_rate") or source.get("transformer.learning_rate") or shared
    parts = dict(zip(source.fact("encoders") or (), ("text_encoder", "text_encoder_2", "text_encoder_3"), strict=False))
    on = {name: part for name, part in parts.items() if source.get(f"{part}.train")}
    factor = _factor(source) ** 0.5
    rates = {name: float(source.get(f"{part}.learning_rate") or shared) * factor for name, part in on.items()}
    answer = trained(rates, float(denoiser) * factor, "full")
    ends = [f"{name} after {end}" for name, part in on.items() if (end := _end(part, source))]
    if not ends or isinstance(answer, Nothing):
        return answer
    reason = f"stop_training_after: to the end of the run here, and {', '.join(ends)} there"
    return (
        Changed(answer.value, answer.remark, (reason,))
        if isinstance(answer, Changed)
        else Changed(answer, "", (reason,))
    )


def _end(part: str, source: Source) -> str:
    """Says when the training of a part ends before the run; empty where it does not."""
    after, unit = source.get(f"{part}.stop_training_after"), source.get(f"{part}.stop_training_after_unit", "NEVER")
    return "" if is_off(after) or unit == "NEVER" else f"{after} {str(unit).lower()}"


def own_rate(value: Any, source: Source) -> Any:
    return NOTHING if value is None else rate(value, source)


def warmup(value: Any, source: Source) -> Any:
    """Above 1 batches of one image each, below a share; OneTrainer counts before gradients are accumulated."""
    if is_off(value):
        return NOTHING
    if value <= 1:
        return {"schedule.warmup": min(float(value), 0.99)}
    return {"schedule.warmup_steps": max(1, int(value / source.get("gradient_accumulation_steps", 1)))}


def weighting(value: Any, source: Source) -> Any:
    strength = float(source.get("loss_weight_strength", 5.0))
    known: dict[Any, Any] = {
        "CONSTANT": NOTHING,
        "MIN_SNR_GAMMA": {"loss.weighting": "min_snr", "loss.snr_gamma": strength},
        "P2": {"loss.weighting": "p2", "loss.p2_gamma": strength},
        "DEBIASED_ESTIMATION": {"loss.weighting": "debiased"},
        "SIGMA": Lost("loss.weighting has sigma_sqrt, and no weight by sigma itself"),
    }
    return known.get(value, Lost("no such weighting here"))


def levels(value: Any, source: Source) -> Any:
    """Converts the distribution of noise levels; a dynamic shift is the family's own."""
    shift = 0.0 if source.get("dynamic_timestep_shifting") else float(source.get("timestep_shift", 1.0))
    weight, bias = float(source.get("noising_weight", 0.0)), float(source.get("noising_bias", 0.0))
    if source.fact("unet"):
        return (
            NOTHING
            if value == "UNIFORM"
            else Lost("loss.timestep_sampling has distributions for SDXL; set one by hand")
        )
    if value == "LOGIT_NORMAL":
        return sampled("logit_normal", shift, weight + 1.0) | ({"loss.logit_mean": bias} if bias else {})
    if value == "HEAVY_TAIL":
        return sampled("mode", shift) | {"loss.mode_scale": weight}
    known = {"UNIFORM": sampled("uniform", shift), "COS_MAP": sampled("cosmap", shift)}
    return known.get(
        value, Lost("no such distribution here; the family's own is used instead (loss.timestep_sampling)")
    )


def span(name: str) -> Any:
    """Returns a noising strength between 0 and 1 as a timestep in thousandths."""

    def convert(value: Any, source: Source) -> Any:
        step = round(float(value) * 1000)
        return NOTHING if step == (0 if name == "min" else 1000) else step

    return convert


def losses(value: Any, source: Source) -> Any:
    strengths = {
        "mse": source.get("mse_strength", 1.0),
        "l1": source.get("mae_strength", 0.0),
        "huber": source.get("huber_strength", 0.0),
    }
    strengths["log-cosh"] = source.get("log_cosh_strength", 0.0)
    used = [name for name, strength in strengths.items() if not is_off(strength)]
    if used == ["mse"] or not used:
        return NOTHING
    if len(used) == 1 and used[0] in ("l1",):
        return used[0]
    delta = f" (delta {source.get('huber_delta', 1.0)})" if "huber" in used else ""
    return Lost(
        f"a sum of losses ({', '.join(used)}){delta}, of which loss.kind takes one; its huber is no pseudo-Huber"
    )


def interval(steps: str, unit: str) -> Any:
    """Returns an interval in the unit that stands beside it: steps, epochs, or a time, which is not here."""

    def convert(value: Any, source: Source) -> Any:
        kind = str(source.get(unit, "MINUTE"))
        if kind == "NEVER" or is_off(value):
            return NOTHING
        if kind == "STEP":
            return {steps: int(value)}
        if kind == "EPOCH":
            return {f"{steps}_epochs": int(value)}
        return Lost(f"an interval in units of time ({kind.lower()}): {steps} counts steps, {steps}_epochs epochs")

    return convert


def without_first(value: Any, source: Source) -> Any:
    """Converts how long no image is drawn to `sample.first`; what goes beyond the first interval is not carried."""
    if is_off(value):
        return NOTHING
    if value <= (source.get("sample_after") or 0):
        return False
    return Changed(False, "", ("grids between the first step and the end of that time are drawn",))


def validated(value: Any, source: Source) -> Any:
    if not source.get("validation"):
        return NOTHING
    return interval("validation.every", "validate_after_unit")(value, source)


def file(value: Any, source: Source) -> Any:
    """Converts the LoRA's file as the folder of a run and a name."""
    path, _, name = str(value).replace("\\", "/").rpartition("/")
    stem = name.removesuffix(".safetensors") or "lora"
    return {"output.dir": f"{path}/{stem}" if path else stem, "output.name": stem}


def format(value: Any, source: Source) -> Any:
    if value in ("DIFFUSERS_LORA", "DIFFUSERS"):
        return "diffusers"
    if value in ("SAFETENSORS", "KOHYA_LORA", "LEGACY_LORA", None):
        return NOTHING
    if value == "COMFY_LORA":
        return format_of_comfyui(source)
    return Lost("output.format has kohya, diffusers and both; `flame-train convert` makes others")


def resolutions(value: Any, source: Source) -> Any:
    """Converts one resolution, or several between commas, in each of which OneTrainer trains every image."""
    if "x" in str(value):
        return side(value, source)
    sides = sides_of(value)
    return sides[0] if len(sides) == 1 else {"data.resolutions": sides}


def rounds(value: Any, source: Source) -> Any:
    """Converts the decay of averaged weights; an update each five steps is one of the fifth root at each."""
    if value == "OFF":
        return NOTHING
    decay, every = float(source.get("ema_decay", 0.999)), int(source.get("ema_update_step_interval", 5))
    if every <= 1:
        return decay
    return Changed(round(decay ** (1 / every), 7), f"at each step, where {decay} stands for {every} steps there")


def beta(name: str) -> Any:
    """Returns one of two decay rates, which most optimizers here have as a pair; Adafactor has the first alone."""

    def convert(value: Any, source: Source) -> Any:
        first, second = source.get("optimizer.beta1"), source.get("optimizer.beta2")
        if value is None:
            return NOTHING
        if first is not None and second is not None:
            return {"optimizer.betas": [first, second]}
        return {f"optimizer.{name}": value}

    return convert


def streamed(value: Any, source: Source) -> Any:
    """Gives the share of layers that wait in host memory, which OneTrainer has with checkpointing on the CPU alone."""
    if is_off(value) or source.get("gradient_checkpointing") != "CPU_OFFLOADED":
        return NOTHING
    return Changed(float(value), "whole blocks, spread over the network")


def offloaded(value: Any, source: Source) -> Any:
    """Converts the share of layers of the denoiser that wait in host memory; they are recomputed."""
    if is_off(value):
        return NOTHING
    return Changed({"model.offload": float(value), "gradient.checkpointing": "full"}, "whole blocks, over the network")


def change(name: str) -> Any:
    """Returns the largest change of an image's colours, in the folder's own unit."""

    def convert(value: Any, source: Source) -> Any:
        strength = source.get(f"image.random_{name}_max_strength", 0.0)
        return Lost(f"by at most {strength} there: set {name} of the folder by hand, as a share") if value else NOTHING

    return convert


def repeats(value: Any, source: Source) -> Any:
    count = float(value)
    if source.get("balancing_strategy", "REPEATS") == "SAMPLES":
        return Lost(f"{count:g} images of the folder in an epoch: set weight to {count:g} divided by their number")
    return int(count) if count == int(count) and count >= 1 else {"set.weight": count}


def overridden(value: Any, source: Source) -> Any:
    """Converts the resolution of a folder of its own."""
    if is_off(value):
        return NOTHING
    answer = resolutions(source.get("image.resolution_override", "512"), source)
    if isinstance(answer, Mapping):
        return {"set.resolutions": answer["data.resolutions"]}
    return answer


def tags(convert: Convert) -> Convert:
    """Returns a setting of changes to tags, where there are some."""

    def checked(value: Any, source: Source) -> Any:
        on = source.get("text.enable_tag_shuffling") or source.get("text.tag_dropout_enable")
        return convert(value, source) if on else NOTHING

    return checked


def dropped_tags(value: Any, source: Source) -> Any:
    """Tags that are left out: each by itself, or all beyond those that are kept."""
    share = float(source.get("text.tag_dropout_probability", 0.0))
    if is_off(value) or not share:
        return NOTHING
    mode = source.get("text.tag_dropout_mode", "FULL")
    if mode == "RANDOM":
        return {"set.captions.tag_dropout": share}
    if mode == "FULL" and not source.get("text.keep_tags_count", 1):
        return {"set.caption_dropout": share}
    return Lost(f"{mode.lower()}: captions.tag_dropout drops each tag alike, data.caption_dropout the whole caption")


def of_tags(value: Any, source: Source) -> Any:
    if is_off(value) or is_off(source.get("text.tag_dropout_enable")):
        return NOTHING
    return Lost("captions.protected are tags that always stay")


def concept_type(value: Any, source: Source) -> Any:
    if value in ("STANDARD", "", None):
        return NOTHING
    if value == "VALIDATION":
        return {"set.validation": True}
    if value == "PRIOR_PREDICTION":
        return {"set.regularization": True, "set.regularization_target": "base"}
    return Lost("expected STANDARD, VALIDATION or PRIOR_PREDICTION")


def as_set(answer: Any) -> Any:
    return answer if isinstance(answer, Mapping) else {"set.repeats": number(answer)}


def unmasked(value: Any, source: Source) -> Any:
    """Converts the share of steps without masks."""
    if not source.get("masked_training") or is_off(value):
        return NOTHING
    return Lost(f"masks count in all steps here, and in {1 - float(value):.0%} of them there")


def with_masks(value: Any, source: Source) -> Any:
    """Converts a setting of masks, where they are used."""
    return value if source.get("masked_training") and not is_off(value) else NOTHING
