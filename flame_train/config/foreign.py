"""Configs of EriDiffusion and ai-toolkit, recognised whole: their keys one by one would be a page of unknown ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

_PAGE: Final = "docs/migration/eridiffusion.md"
_KINDS: Final = ("sdxl", "sd3", "sd35", "sd3.5", "flux")
_FLAT: Final = ("weights", "bf16_params", "grad_accum_steps", "steps", "lr", "batch_size", "optimizer")


def refuse_foreign(tree: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for a config in one of EriDiffusion's two forms; says which, and where its keys went."""
    what = _what(tree)
    if what:
        raise ConfigError(
            f"{source}: expected a config of flame-train, got {what}; `flame-train init FAMILY` writes one of ours, "
            f"and {_PAGE} says where each key went"
        )


def _what(tree: Mapping[str, Any]) -> str:
    if _has_processes(tree):
        return "a job of EriDiffusion or ai-toolkit (job, config.process)"
    kind = tree.get("model_kind")
    if isinstance(kind, str) and kind.lower() in _KINDS and any(name in tree for name in (*_FLAT, *_paths(tree))):
        return "one of EriDiffusion's flat configs (model_kind)"
    return ""


def _has_processes(tree: Mapping[str, Any]) -> bool:
    job = tree.get("config")
    return "job" in tree and isinstance(job, Mapping) and isinstance(job.get("process"), list)


def _paths(tree: Mapping[str, Any]) -> list[str]:
    """`sdxl_unet_path`, `sd35_t5_path` and the like."""
    return [name for name in tree if name.startswith(("sdxl_", "sd35_", "sd3_", "flux_"))]
