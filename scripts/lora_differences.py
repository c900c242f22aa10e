"""How two LoRA files differ: in tensors' bits, and in metadata but for what may differ."""

from __future__ import annotations

from pathlib import Path

from flame_train.io.safetensors import SafetensorsFile

VERSION, CONFIG = {"flame_train_version"}, {"flame_train_config", "flame_train_config_hash", "sshs_legacy_hash"}
"""`sshs_legacy_hash` is over a stretch of the file that begins after its header, which the config lengthens."""


def differences(before: Path, after: Path, ignored: set[str]) -> list[str]:
    """Returns a line for each tensor and each key of the metadata that differs."""
    with SafetensorsFile(before) as old, SafetensorsFile(after) as new:
        found = [f"tensor {name}: in one file alone" for name in set(old.names) ^ set(new.names)]
        for name in set(old.names) & set(new.names):
            a, b = old.read(name), new.read(name)
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                found.append(f"tensor {name}: other bits")
        keys = (old.metadata.keys() | new.metadata.keys()) - ignored
        found += [f"metadata {key}" for key in keys if old.metadata.get(key) != new.metadata.get(key)]
    return sorted(found)
