"""What a base in fewer bits costs in quality: small SDXL, SD3 and Flux beside the same base in bf16.

    python scripts/quality_table.py [--device cuda] [--families sdxl,flux] [--formats int8,nf4] [--steps 500]

Of one step, from the same LoRA, batch and noise: how far the loss and the LoRA's gradients are from bf16's. The row
fp32 says how far bf16 itself is from fp32. With `--steps`, of runs from the same beginning: the last losses, the loss
of images that were held out, and the cosine of the finished LoRA's update with that of bf16.

The small SDXL is the trained one of the package. SD3 and Flux have random weights; their LoRA only learns a better
guess of the velocity.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.attach import Attached, attach
from flame_train.adapters.targets import resolve
from flame_train.config.schema import Config
from flame_train.engine import capture
from flame_train.engine.backend import get_backend
from flame_train.models.common.model import Model
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.run.check.check import storage_of
from flame_train.run.train.state import make_state
from flame_train.tools.bench.models import conditioning
from flame_train.training.batch import Batch, HostBatch
from flame_train.training.session import Session
from flame_train.training.step import State, micro, update
from flame_train.training.validation import HeldOut, Validator

RANK, SEED, BATCH, TRAINED, HELD_OUT = 8, 7, 4, 12, 4
FORMATS = {
    "fp32": ("fp32", "off", "bf16"),
    "bf16": ("bf16", "off", "bf16"),
    "fp8": ("bf16", "fp8", "bf16"),
    "fp8 products": ("bf16", "fp8", "fp8"),
    "int8": ("bf16", "int8", "bf16"),
    "int8 products": ("bf16", "int8", "int8"),
    "nf4": ("bf16", "nf4", "bf16"),
}
"""train.precision, model.quantize and model.arithmetic by a row's name."""

Host = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Base:
    """A small model, and made-up images for it."""

    family: str
    model: Model
    device: str
    pixels: int

    @classmethod
    def written(cls, family: str, folder: Path, device: str, pixels: int) -> Base:
        FAMILIES[family].write_small_base(folder, SEED)
        return cls(
            family, FAMILIES[family].open(replace(NOTHING_NAMED, base=folder / "base.safetensors")), device, pixels
        )

    @cached_property
    def images(self) -> dict[str, Host]:
        """Latent moments and conditioning: smooth, so that there is something to learn; the last are held out."""
        count, (height, width, channels) = TRAINED + HELD_OUT, self.model.vae.latent_shape((self.pixels, self.pixels))
        coarse = np.random.default_rng(0).standard_normal((count, 2, 2, channels)).astype(np.float32)
        mean = 2.0 * coarse.repeat(height // 2, axis=1).repeat(width // 2, axis=2)
        return {"mean": mean, "logvar": np.full_like(mean, -8.0), **conditioning(self.model, self.pixels, count)}

    def batch(self, step: int) -> HostBatch:
        chosen = (np.arange(BATCH) + step * BATCH) % TRAINED
        return HostBatch(
            {n: a[chosen] for n, a in self.images.items()}, step, np.arange(BATCH), tuple(map(str, chosen))
        )

    def run(self, name: str, steps: int) -> tuple[State, Attached]:
        """A run that begins, its base in the format of this name."""
        precision, quantize, arithmetic = FORMATS[name]
        config = Config.model_validate(
            {
                "train": {"precision": precision, "steps": steps, "seed": SEED},
                "lora": {"rank": RANK, "alpha": float(RANK)},
                "optimizer": {"lr": 1e-3},
                "schedule": {"name": "constant"},
            }
        )
        storage = storage_of(quantize, arithmetic)
        denoiser = self.model.load_denoiser(device=self.device, dtype=precision, storage=storage)
        layers = resolve(denoiser.network, ("attention",), self.model.presets)
        attached = attach(denoiser.network, layers, rank=RANK, alpha=float(RANK), seed=SEED)
        return make_state(denoiser, attached, config, Session(self.device)), attached


def one_step(base: Base, name: str) -> tuple[float, Host]:
    """The loss and the LoRA's gradients of a first step, whose up matrices are small and not zero."""
    (state, attached), rng = base.run(name, 1), np.random.default_rng(1)
    arena, backend = state.optimizer.arena, get_backend(base.device)
    for parameter in attached.parameters():
        if not bool(parameter.data.any()):
            backend.write(parameter.data, rng.uniform(-1e-2, 1e-2, parameter.shape).astype(np.float32))
    arena.sync_copies()
    place = Batch(base.batch(0), backend, state.dtype)
    place.fill(base.batch(0))
    micro(state, place)
    return float(backend.to_host(state.loss.data)), backend.to_host(arena.grads).astype(np.float64)


def trained(base: Base, name: str, steps: int) -> tuple[list[float], float, Host]:
    """The losses of a run, the loss of what was held out, and the LoRA's update of all layers."""
    (state, attached), backend = base.run(name, steps), get_backend(base.device)
    place = Batch(base.batch(0), backend, state.dtype)

    def once() -> None:
        micro(state, place)
        update(state)

    step, losses = capture(once, base.device), []
    for number in range(steps):
        place.fill(base.batch(number))
        step()
        losses.append(float(backend.to_host(state.figures)[0]))
    held = HeldOut.of([{n: a[TRAINED + i] for n, a in base.images.items()} for i in range(HELD_OUT)])
    asked: dict[str, Any] = {"timesteps": 8, "batch_size": BATCH, "device": base.device, "dtype": state.dtype}
    measured = Validator(state.denoiser, state.objective, held, **asked).measure().loss
    deltas = [adapter.delta().numpy().ravel() for adapter in attached.adapters.values()]
    return losses, measured, np.concatenate(deltas).astype(np.float64)


def cosine(a: Host, b: Host) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def rows(base: Base, names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """A row a format, each beside bf16's; what a format has for a run of no steps is left out."""
    loss, gradients = one_step(base, "bf16")
    begun = trained(base, "bf16", steps) if steps else None
    found = []
    for name in names:
        other, theirs = (loss, gradients) if name == "bf16" else one_step(base, name)
        row: dict[str, Any] = {"family": base.family, "base": name}
        row["loss, % off"] = 100 * abs(other - loss) / loss
        row["gradients, % off"] = 100 * float(np.linalg.norm(theirs - gradients) / np.linalg.norm(gradients))
        row["gradients' cosine"] = cosine(theirs, gradients)
        if begun is not None:
            losses, held_out, update_of = begun if name == "bf16" else trained(base, name, steps)
            last = max(1, steps // 10)
            row["mean of the last tenth"] = float(np.mean(losses[-last:]))
            row["held out"] = held_out
            row["held out, % off"] = 100 * (held_out - begun[1]) / begun[1]
            row["LoRA's cosine"] = cosine(update_of, begun[2])
        found.append(row)
        print(f"{base.family}, {name}: done", file=sys.stderr, flush=True)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    heads = [*found[0]]
    lines = [heads, ["---"] * len(heads)]
    lines += [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chosen(text: str, among: Sequence[str]) -> list[str]:
    """The names in a list with commas. Raises ArgumentTypeError for one that is not `among` them."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in among:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(among)}, got {name!r}")
    return names


def main() -> None:
    families, small = ("sdxl", "sd3", "flux"), tuple(FORMATS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--families", type=partial(chosen, among=families), default=[*families])
    parser.add_argument("--formats", type=partial(chosen, among=small), default=[*small])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pixels", type=int, default=128, help="side of the images")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            found += rows(Base.written(family, Path(folder), args.device, args.pixels), args.formats, args.steps)
    print(json.dumps(found, indent=1) if args.json else table(found))


if __name__ == "__main__":
    main()
