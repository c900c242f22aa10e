"""Some minutes of attack on flame-train: damaged files, and kills of a run. Exits with 1 if anything did not hold.

    python scripts/attack [--minutes 5] [--seed 0] [--only kills headers configs images loras vocabularies names]
    python scripts/attack --only ggufs packed recorded sweeps jobs runs
    python scripts/attack --only folders calls cuts soak

What is tried is drawn from the seed, so a failure can be had again; how much is tried depends on the machine. The four
of the last line try a fixed number, however long that takes: hostile run folders, a kill at each call that touches a
file, power cuts (as root), and a run of thousands of steps. `calls` and `cuts` need Linux and a C compiler.
`docs/reliability.md` says what must hold, and what longer campaigns tried.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import calls
import cuts
import files
import folders
import interpose
import kills
import names
import soak
import surfaces

READ = files.KINDS | surfaces.KINDS
TIMED = {"kills": kills.attack, "names": names.attack} | {name: files.attack_of(name, READ[name]) for name in READ}
WHOLE = {"folders": folders.attack, "calls": calls.attack, "cuts": cuts.attack, "soak": soak.attack}
ATTACKS = TIMED | WHOLE
INTERPOSED = ("calls", "cuts")
_SHOWN = 5


def main() -> int:
    """Runs each attack for its share of the time and prints a line about it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(TIMED))
    asked = parser.parse_args()
    if set(asked.only) & set(INTERPOSED):
        interpose.load()
        interpose.unload()
    share = 60 * asked.minutes / (len(asked.only) + ("kills" in asked.only))  # kills get two: each takes seconds
    failed = 0
    for name in asked.only:
        with tempfile.TemporaryDirectory(prefix=f"attack-{name}-") as folder:
            end = time.monotonic() + share * (2 if name == "kills" else 1)
            outcomes, failures = ATTACKS[name](Path(folder), random.Random(f"{name} {asked.seed}"), end)
        failed += len(failures)
        print(f"{name}: {told(outcomes)}; {len(failures)} did not hold")
        print("".join(f"  {failure}\n" for failure in failures[:_SHOWN]), end="", flush=True)
    return 1 if failed else 0


def told(outcomes: Counter[str]) -> str:
    """Such as "300 tried: 290 refused, 10 read"."""
    return f"{outcomes.total()} tried: " + ", ".join(f"{count} {what}" for what, count in outcomes.most_common())


if __name__ == "__main__":
    sys.exit(main())
