"""The report of `--dry-run`: the plan for a user."""

from __future__ import annotations

from typing import Any

from flame_train.adapters.kinds import ADAPTERS
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES

from ..memory.budget import GIB, OUTSIDE, Fitted
from ..memory.prediction import PredictedMemory
from ..plan import Plan


def describe(plan: Plan, memory: PredictedMemory, processes: int = 1, budget: Fitted | None = None) -> dict[str, Any]:
    """The plan as a user reads it, for so many processes; the memory is that of each, and what the budget chose."""
    c, order = plan.config, plan.order
    return {
        "family": plan.model.name,
        "checkpoint": c.model.checkpoint,
        "precision": c.train.precision,
        "adapter": f"{ADAPTERS.chosen(c.lora).name}, rank {c.lora.rank}, alpha {c.lora.alpha:g}",
        "optimizer": f"{OPTIMIZERS.chosen(c.optimizer).name}, lr {c.optimizer.lr:g}",
        "schedule": SCHEDULES.chosen(c.schedule).name,
        "prompts": len(c.sample.prompts) if c.sample.repeats else 0,
        **({"sample images by": c.sample.model} if plan.checked.sample_model is not plan.model else {}),
        "images": len(plan.samples.rows),
        **_masks(plan),
        "samples per epoch": order.samples_per_epoch,
        **({"validation images": len(plan.held_out.rows)} if plan.held_out.rows else {}),
        "buckets": plan.samples.bucket_rows(),
        "steps": c.train.steps,
        "batches per epoch": order.batches_per_epoch,
        "repeated to fill batches, per epoch": order.filled_per_epoch,
        "epochs": round(c.train.steps * c.gradient.accumulation * processes / order.batches_per_epoch, 2),
        "adapted layers": len(plan.checked.targets),
        "trainable parameters": plan.parameters,
        "base parameters": plan.model.network.num_weights(),
        "checkpointed blocks": f"{len(plan.checked.checkpointed)} of {len(plan.model.network.named_blocks())}",
        **_streamed(plan, memory),
        **({"processes, each with the predicted memory": processes} if processes > 1 else {}),
        "predicted memory GiB": round(memory.peak / 2**30, 2),
        "predicted memory GiB in training": round(memory.training / 2**30, 2),
        "predicted ms a step": round(memory.seconds * 1e3, 1),
        **({} if budget is None else _of_budget(budget)),
        "texts": len({text for row in plan.samples.rows for text in row.texts}),
        **({"control images": sum(len(row.controls) for row in plan.samples.rows)} if plan.samples.controlled else {}),
        "cached views of images": sum(len(row.views) for row in plan.samples.rows),
        "cache GiB": round(plan.cache_bytes / 2**30, 3),
        "output": c.output.dir,
    }


def _masks(plan: Plan) -> dict[str, Any]:
    """How many images have a mask, where any is asked for."""
    asked = [row for row in plan.samples.rows if row.set.masks != "off"]
    without = sum(mask is None or (mask.alpha and mask.blank == "white") for mask in (row.item.mask for row in asked))
    return {"masks": len(asked) - without, "images without a mask": without} if asked else {}


def _streamed(plan: Plan, memory: PredictedMemory) -> dict[str, Any]:
    """What waits in host memory, where anything does."""
    if not memory.host:
        return {}
    return {
        "streamed blocks": f"{len(plan.checked.streamed)} of {len(plan.model.network.named_blocks())}",
        "predicted host memory GiB": round(memory.host / 2**30, 2),
    }


def _of_budget(budget: Fitted) -> dict[str, Any]:
    """The budget, its use, and the lines of a config that fix what was chosen."""
    return {
        "memory budget GiB": round(budget.budget / GIB, 2),
        f"predicted GiB of it, {OUTSIDE / GIB:.2f} of the CUDA context included": round(budget.peak / GIB, 2),
        "chosen for the budget": budget.lines or "nothing: the config fits as it is",
    }
