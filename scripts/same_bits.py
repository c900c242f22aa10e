"""Whether two folders of quickstarts hold the same LoRAs: the tensors' bits, and the metadata but for what may differ.

    python scripts/same_bits.py BEFORE AFTER [--config-may-differ]

Each folder has one quickstart a family: `flame-train quickstart BEFORE/sdxl --device cpu`, and likewise sd3 and flux
with `--family`. A refactoring trains them before and after. `--config-may-differ` leaves the record of the config out,
for changes of the config's keys.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flame_train.io.safetensors import SafetensorsFile

VERSION, CONFIG = {"flame_train_version"}, {"flame_train_config", "flame_train_config_hash", "sshs_legacy_hash"}
"""`sshs_legacy_hash` is over a stretch of the file that begins after its header, which the config lengthens."""


def differences(before: Path, after: Path, ignored: set[str]) -> list[str]:
    """A line for each tensor and each key of the metadata that differs."""
    with SafetensorsFile(before) as old, SafetensorsFile(after) as new:
        found = [f"tensor {name}: in one file alone" for name in set(old.names) ^ set(new.names)]
        for name in set(old.names) & set(new.names):
            a, b = old.read(name), new.read(name)
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                found.append(f"tensor {name}: other bits")
        keys = (old.metadata.keys() | new.metadata.keys()) - ignored
        found += [f"metadata {key}" for key in keys if old.metadata.get(key) != new.metadata.get(key)]
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--config-may-differ", action="store_true")
    args = parser.parse_args()
    ignored = VERSION | (CONFIG if args.config_may_differ else set())
    different = 0
    families = sorted(path.name for path in args.before.iterdir() if (path / "run" / "lora.safetensors").exists())
    for family in families:
        files = [folder / family / "run" / "lora.safetensors" for folder in (args.before, args.after)]
        found = differences(files[0], files[1], ignored)
        with SafetensorsFile(files[0]) as file:
            print(f"{family}: {len(file.names)} tensors, {len(found)} differences")
        for line in found[:10]:
            print(f"  {line}")
        different += len(found)
    sys.exit(1 if different or not families else 0)


if __name__ == "__main__":
    main()
