"""The report of `--dry-run`: the plan as numbers for a program, and as text for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.adapters.kinds import ADAPTERS
from flame_train.engine.backend.host_memory import available
from flame_train.engine.shape_run import Gpu
from flame_train.errors import counted, lines_shown
from flame_train.families import licence_of, told_terms
from flame_train.io.hub_upload import hub_name
from flame_train.optimizers import OPTIMIZERS
from flame_train.run.plan.plan import Plan
from flame_train.run.plan.start import checkpoint_bytes
from flame_train.schedules import SCHEDULES

from ..memory.budget import GIB, OUTSIDE, FittedPlan
from ..memory.prediction import PredictedMemory

FORMAT: Final = 1
"""Of the report's names; one that goes or changes its meaning raises it."""

_TIMED: Final = "H200"
"""The card whose data sheet a described GPU's step time is of."""

_CARDS: Final = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141, 180, 288)  # GB


def describe(
    plan: Plan,
    memory: PredictedMemory,
    gpu: Gpu,
    device: str,
    processes: int = 1,
    budget: FittedPlan | None = None,
    continued: int | None = None,
) -> dict[str, Any]:
    """Returns the plan as names and values; a value that does not apply is None.

    Args:
        gpu: the card that it was predicted for.
        budget: what was chosen for `memory.budget`.
        continued: the step after which the run of the folder goes on; None: a new run.
    """
    c, order = plan.config, plan.order
    needed = memory.peak + OUTSIDE
    room = budget.budget if budget is not None else gpu.memory if gpu.name else None
    return {
        "format": FORMAT,
        "family": plan.model.name,
        "checkpoint": c.model.checkpoint,
        "licence": licence_of(plan.model.name, c.model.checkpoint),
        "precision": c.train.precision,
        "device": device,
        "adapter": {"kind": ADAPTERS.chosen(c.lora).name, "rank": c.lora.rank, "alpha": c.lora.alpha},
        "adapted_layers": len(plan.checked.targets),
        "trainable_parameters": plan.parameters,
        "base_parameters": plan.model.network.num_weights(),
        "optimizer": {"name": OPTIMIZERS.chosen(c.optimizer).name, "lr": c.optimizer.lr},
        "schedule": SCHEDULES.chosen(c.schedule).name,
        "steps": c.train.steps,
        "epochs": round(c.train.steps * c.gradient.accumulation * processes / order.batches_per_epoch, 2),
        "batches_per_epoch": order.batches_per_epoch,
        "samples_per_epoch": order.samples_per_epoch,
        "filled_samples_per_epoch": order.filled_per_epoch,
        "processes": processes,
        "images": len(plan.samples.rows),
        "validation_images": len(plan.held_out.rows),
        **_masks(plan),
        "control_images": sum(len(row.controls) for row in plan.samples.rows),
        "captions": len({text for row in plan.samples.rows for text in row.texts}),
        "cached_views": sum(len(row.views) for row in plan.samples.rows),
        "cache_gib": _gib(plan.cache_bytes(), 5),
        "checkpoints_gib": _gib(checkpoint_bytes(plan), 3),
        "buckets": plan.samples.bucket_rows(),
        "prompts": len(c.sample.prompts) if c.sample.repeats else 0,
        "sample_model": c.sample.model if plan.checked.sample_model is not plan.model and c.sample.model else None,
        "training_adapter": c.model.training_adapter or None,
        "found": [one.as_dict() for one in plan.checked.found],
        "blocks": len(plan.model.network.named_blocks()),
        "recomputed_blocks": len(plan.checked.checkpointed),
        "streamed_blocks": len(plan.checked.streamed),
        "predicted_memory_gib": _gib(memory.peak),
        "predicted_training_memory_gib": _gib(memory.training),
        "cuda_context_gib": _gib(OUTSIDE),
        "predicted_host_memory_gib": _gib(memory.host),
        "free_host_memory_gib": _gib(available()),
        "predicted_step_ms": None if device == "cpu" else round(memory.seconds * 1e3, 1),
        "step_time_of": None if device == "cpu" else gpu.name or _TIMED,
        "gpu": {"name": gpu.name, "memory_gib": _gib(gpu.memory)} if gpu.name else None,
        "memory_budget_gib": None if budget is None else _gib(budget.budget),
        "chosen_for_the_budget": [] if budget is None else budget.lines,
        "fits": None if room is None else needed <= room,
        "smallest_card_gb": next((gb for gb in _CARDS if needed <= gb * 10**9), None),
        "output": c.output.dir,
        "continued_after_step": continued,
        "hub": {"repository": hub_name(c.output.hub), "public": c.output.hub_public} if c.output.hub else None,
    }


def _masks(plan: Plan) -> dict[str, int]:
    """Returns how many images have a mask, and of those that should have one how many have none."""
    masked = [row for row in plan.samples.rows if row.set.masks != "off"]
    without = sum(mask is None or (mask.alpha and mask.blank == "white") for mask in (row.item.mask for row in masked))
    return {"masks": len(masked) - without, "images_without_a_mask": without}


def _gib(size: float, digits: int = 2) -> float:
    return round(size / GIB, digits)


def as_text(p: Mapping[str, Any]) -> str:
    """Returns the plan of `describe` for a reader, in groups; its last line says whether it fits."""
    groups = {"Training": _training(p), "Images": _images(p), "Memory": _memory(p)}
    lines = []
    for title, rows in groups.items():
        width = max(map(len, rows))
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""]
    return lines_shown("\n".join([*lines, verdict(p)]))


def _epochs(number: float) -> str:
    return f"{number:g} {'epoch' if number == 1 else 'epochs'}"


def _training(p: Mapping[str, Any]) -> dict[str, str]:
    adapter, optimizer, schedule = p["adapter"], p["optimizer"], p["schedule"]
    per_epoch = counted(p["batches_per_epoch"], "batch", "batches")
    prompts = counted(p["prompts"], "prompt") if p["prompts"] else "none"
    drawn = f", drawn by {p['sample_model']}" if p["sample_model"] else ""
    added = {"training adapter": f"{p['training_adapter']}, in training alone: samples leave it out"}
    return {
        "base model": f"{p['checkpoint']} ({p['family']}, {p['base_parameters']:,} weights, {p['precision']})",
        **(added if p["training_adapter"] else {}),
        "its licence": told_terms(p["licence"]),
        "adapter": f"{adapter['kind']} of rank {adapter['rank']}, alpha {adapter['alpha']:g}, on "
        f"{counted(p['adapted_layers'], 'layer')}: {p['trainable_parameters']:,} trained values",
        "optimizer": f"{optimizer['name']}, learning rate {optimizer['lr']:g}, {schedule} schedule",
        "length": f"{counted(p['steps'], 'step')}, which are {_epochs(p['epochs'])} of {per_epoch}",
        "sample images": f"{prompts}{drawn}",
        **{f"found {one['for']}": f"{one['path']}: {one['why']}" for one in p["found"]},
        "run folder": p["output"],
        **({"continued": f"after step {p['continued_after_step']}"} if p["continued_after_step"] else {}),
        **({"published": _published(p["hub"])} if p["hub"] else {}),
        **({"processes": f"{p['processes']}, each with the memory below"} if p["processes"] > 1 else {}),
    }


def _published(hub: Mapping[str, Any]) -> str:
    seen = "seen by everybody" if hub["public"] else "private"
    return f"at the end, to {hub['repository']} on the Hugging Face hub, {seen}: LoRA, card and last samples"


def _images(p: Mapping[str, Any]) -> dict[str, str]:
    filled = p["filled_samples_per_epoch"]
    repeat = f", of which {filled:,} {'repeats' if filled == 1 else 'repeat'} others to fill batches" if filled else ""
    rows = {
        "trained on": f"{counted(p['images'], 'image')}, {counted(p['samples_per_epoch'], 'sample')} an epoch{repeat}",
        "held out": f"{counted(p['validation_images'], 'image')} for validation" if p["validation_images"] else "none",
    }
    if p["control_images"]:
        rows["control"] = counted(p["control_images"], "image")
    if p["masks"] or p["images_without_a_mask"]:
        rows["masks"] = (
            f"{counted(p['masks'], 'image')}; {p['images_without_a_mask']} without one, which count everywhere"
        )
    names = [_bucket_name(row) for row in p["buckets"]]
    rows |= {name: _bucket(row) for name, row in zip(names, p["buckets"], strict=True)}
    views, captions = counted(p["cached_views"], "encoded image"), counted(p["captions"], "caption")
    size = f"{p['cache_gib']:.2f} GiB" if p["cache_gib"] >= 0.1 else f"{p['cache_gib'] * 1024:.1f} MiB"
    return rows | {"cache": f"{size} on disk: {views}, {captions}"}


def _bucket_name(row: Mapping[str, Any]) -> str:
    frames = row.get("frames", 1)
    return f"{row['bucket']} pixels" + (f", {frames} frames" if frames > 1 else "")


def _bucket(row: Mapping[str, Any]) -> str:
    least, most = f"{row['scale_least']:.2f}", f"{row['scale_most']:.2f}"
    scaled = least if least == most else f"{least} to {most}"
    cropped = f", up to {row['cropped_most']:.0%} cropped away" if round(row["cropped_most"], 2) else ""
    return f"{counted(row['images'], 'image')}, scaled by {scaled}{cropped}"


def _memory(p: Mapping[str, Any]) -> dict[str, str]:
    training, context = p["predicted_training_memory_gib"], p["cuda_context_gib"]
    rows = {
        "GPU": f"{_needed(p):.2f} GiB at the peak, {training + context:.2f} in training, with {context:.2f} for CUDA",
        "host": f"{p['predicted_host_memory_gib']:.2f} GiB of weights wait there, of "
        f"{p['free_host_memory_gib']:.2f} that are free",
        "blocks": f"{p['recomputed_blocks']} of {p['blocks']} recomputed in the backward pass, "
        f"{p['streamed_blocks']} of {p['blocks']} streamed from the host",
    }
    if p["predicted_step_ms"] is not None:
        on = p["step_time_of"] if p["gpu"] else f"an {p['step_time_of']}"
        rows["time"] = f"{p['predicted_step_ms']:.4g} ms a step on {on}"
    if p["memory_budget_gib"] is not None:
        rows["budget"] = f"{p['memory_budget_gib']:.2f} GiB; these lines in the config fix what was chosen for it:"
        chosen = p["chosen_for_the_budget"] or ["nothing: the config fits as it is"]
        rows |= {f"{'':{number}}": line for number, line in enumerate(chosen, 1)}
    return rows


def _needed(p: Mapping[str, Any]) -> float:
    return float(p["predicted_memory_gib"] + p["cuda_context_gib"])


def verdict(p: Mapping[str, Any], card: float | None = None) -> str:
    """Tells whether the run fits what is here, and which card is meant; also whether it fits one of so many GB."""
    needed, smallest = f"{_needed(p):.2f} GiB", p["smallest_card_gb"]
    of_card = (
        f"Fits a card of {smallest} GB: it takes {needed}." if smallest else f"Fits no single card: it takes {needed}."
    )
    if card is not None:
        within = _needed(p) * GIB <= card * 10**9
        of_card = f"{'Fits' if within else 'Does not fit'} a card of {card:g} GB: it takes {needed}."
    further = f" {of_card}" if card is not None else ""
    if p["memory_budget_gib"] is not None:
        return f"Fits memory.budget: it takes {needed} of {p['memory_budget_gib']:.2f} GiB.{further}"
    if p["gpu"] is not None:
        here = f"{p['gpu']['name']} with {p['gpu']['memory_gib']:.2f} GiB"
        if p["fits"]:
            return f"Fits {here}: it takes {needed}.{further}"
        return f"Does not fit {here}: it takes {needed}. --memory auto lets the plan choose settings that fit."
    return f"Runs on the CPU. {of_card}" if p["device"] == "cpu" else f"{of_card} No GPU is here."
