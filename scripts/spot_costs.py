"""What a LoRA costs on cards that can be taken away, against reserved ones: a simulation.

    python scripts/spot_costs.py [--write]

Prices and interruption rates are those that `SOURCES` names, of their day; `--write` puts the tables into
docs/spot-costs.md. A run of so many hours of training is split into intervals of its checkpoints. Interruptions come
at random, with the same chance in every hour. After one, what was trained since the newest checkpoint that had arrived
in the store is trained again, and the next machine takes a while to come: its start is not paid, fetching the base
model and loading it are. A fleet of cards trains one run a card at once, so its length is that of its slowest run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "spot-costs.md"
TRIES = 2000
"""Runs that are drawn for each cell."""


@dataclass(frozen=True)
class Offer:
    """A card: dollars an hour reserved and as spot, and how often it is taken away, an hour."""

    name: str
    reserved: float
    spot: float
    hourly: float


def monthly(share: float) -> float:
    """Interruptions an hour where such a share of machines is taken away within a month of 730 hours."""
    return float(-np.log1p(-share) / 730)


@dataclass(frozen=True)
class Job:
    """A LoRA: hours of training, GiB of a checkpoint, and hours that a new machine is paid before it trains."""

    name: str
    hours: float
    checkpoint: float
    setup: float


SOURCES = (
    "Prices are dollars an hour of an H100, on demand and as spot, as a comparison of providers listed them in March "
    "2026 (deploybase.ai/articles/spot-gpu-pricing). RunPod takes 2.69 and 0.81, and AWS 6.88 and 3.44. The comparison "
    "gives 8 to 12 % interruptions for H100s. AWS's Spot Instance Advisor has bands from under 5 % to over 20 % of a "
    "month. The rows take 10 %. Two more rows are assumed worse: half of all machines in a month, and one interruption "
    "in 4 hours."
)
OFFERS = (
    Offer("AWS, 10 % a month", 6.88, 3.44, monthly(0.1)),
    Offer("RunPod, 10 % a month", 2.69, 0.81, monthly(0.1)),
    Offer("RunPod, half in a month", 2.69, 0.81, monthly(0.5)),
    Offer("RunPod, one in 4 hours", 2.69, 0.81, 0.25),
)
JOBS = (Job("SDXL, rank 16", 2.0, 0.37, 0.1), Job("Flux, rank 16", 12.0, 0.75, 0.2))
INTERVALS = (2, 10, 30, 120)
"""Minutes between checkpoints."""
SPEEDS = (10, 100, 1000)
"""Mbit/s of the upload."""
CARDS = (1, 10, 100, 1000)


def paid_hours(job: Job, offer: Offer, minutes: float, mbit: float, runs: int, seed: int = 0) -> np.ndarray:
    """Hours that are paid for each of so many runs, as drawn.

    A checkpoint counts once it has arrived, and the next begins to be sent once the one before has.
    """
    random = np.random.default_rng(seed)
    interval, upload = minutes / 60, job.checkpoint * 8.59 * 1000 / mbit / 3600
    kept_every = interval * max(1.0, np.ceil(upload / interval))  # those that come while one is sent are passed over
    paid, done = np.zeros(runs), np.zeros(runs)
    left = np.arange(runs)
    while left.size:
        life = random.exponential(1 / offer.hourly, left.size)
        trained = np.maximum(life - job.setup, 0.0)
        ends = trained >= job.hours - done[left]
        paid[left[ends]] += job.setup + job.hours - done[left[ends]]
        lost = left[~ends]
        paid[lost] += life[~ends]
        arrived = np.floor(np.maximum(trained[~ends] - upload, 0.0) / kept_every) * kept_every
        done[lost] += arrived
        left = lost
    return paid


def tables() -> str:
    """The page."""
    lines = ["# What a LoRA costs on spot cards", "", "Written by `scripts/spot_costs.py --write`. " + SOURCES, ""]
    for job in JOBS:
        title = f"## {job.name}: {job.hours:g} h of training, checkpoints of {job.checkpoint:g} GiB"
        lines += [title, "", "Dollars for one run, as a mean; in brackets the share of the reserved card's price.", ""]
        lines += ["| interruptions | reserved | upload | " + " | ".join(f"every {m} min" for m in INTERVALS) + " |"]
        lines += ["|" + "---|" * (3 + len(INTERVALS))]
        for offer in OFFERS:
            reserved = (job.hours + job.setup) * offer.reserved
            for mbit in SPEEDS:
                cells = []
                for minutes in INTERVALS:
                    cost = float(paid_hours(job, offer, minutes, mbit, TRIES).mean()) * offer.spot
                    cells.append(f"{cost:.2f} ({cost / reserved:.0%})")
                lines.append(f"| {offer.name} | {reserved:.2f} | {mbit} Mbit/s | {' | '.join(cells)} |")
        lines += ["", *_fleet(job)]
    return "\n".join(lines).rstrip() + "\n"


def _fleet(job: Job) -> list[str]:
    """A table of fleets: dollars a run, and hours that are paid until the last is done."""
    lines = ["Several cards with a run each, checkpoints every 10 minutes, 100 Mbit/s: dollars for all; the slowest "]
    lines[0] += "run's paid hours."
    lines += [
        "",
        "| interruptions | " + " | ".join(f"{n} card" + "s" * (n > 1) for n in CARDS) + " |",
        "|" + "---|" * (1 + len(CARDS)),
    ]
    for offer in OFFERS:
        cells = []
        for cards in CARDS:
            fleets = paid_hours(job, offer, 10, 100, cards * 20).reshape(20, cards)
            cells.append(f"{fleets.sum(1).mean() * offer.spot:,.2f}; {fleets.max(1).mean():.1f} h")
        lines.append(f"| {offer.name} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = tables()
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
