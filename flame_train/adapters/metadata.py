"""The metadata of a LoRA file, by which web interfaces recognise, name and look up LoRAs.

The `ss_*` and `sshs_*` keys are kohya's convention; `modelspec.*` is the ModelSpec 1.0.1 standard. All values
are text. No time and no path is written, so that equal runs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from flame_train.adapters.factors import Array, LoraState
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import hash_data, serialize

_LEGACY_BEGIN: Final = 0x100000
_LEGACY_END: Final = 0x110000


def network_metadata(
    state: LoraState, family: LoraFamily, network_args: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the `ss_*` keys that every reader of kohya files relies on; "Dynamic" where modules differ.

    As kohya has it, convolutions larger than 1x1 have a rank and an alpha of their own, among the arguments.
    """
    all_factors = [factors for modules in state.values() for factors in modules.values()]
    args = (
        ADAPTERS[all_factors[0].kind].files.args_of(f for f in all_factors if f.kind == all_factors[0].kind)
        if all_factors
        else {}
    )
    kernels = [factors for factors in all_factors if _has_kernel(factors)]
    linear = [factors for factors in all_factors if not _has_kernel(factors)] or all_factors
    if linear is not all_factors and kernels:
        args |= _of_kernels(kernels)
    ranks, alphas = ({str(f.rank) for f in linear}, {str(float(f.alpha)) for f in linear})
    return {
        "ss_v2": "False",
        "ss_base_model_version": family.base_version,
        "ss_network_module": "lycoris.kohya" if "algo" in args else family.network_module,
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": alphas.pop() if len(alphas) == 1 else "Dynamic",
        "ss_network_args": json.dumps(args | dict(network_args or {}), sort_keys=True),
    }


def _has_kernel(factors: Factors) -> bool:
    return math.prod(factors.weight_shape[2:]) > 1


def _of_kernels(kernels: Sequence[Factors]) -> dict[str, str]:
    """kohya's arguments for convolutions, where all have the same."""
    ranks, alphas = {factors.rank for factors in kernels}, {float(factors.alpha) for factors in kernels}
    if len(ranks) > 1 or len(alphas) > 1:
        return {}
    return {"conv_dim": str(ranks.pop()), "conv_alpha": f"{alphas.pop():g}"}


def model_spec(family: LoraFamily, title: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """ModelSpec 1.0.1's required keys; `extra` (author, trigger_phrase, ...) goes by bare name."""
    fields = {
        "sai_model_spec": "1.0.1",
        "architecture": family.architecture,
        "implementation": family.implementation,
        "title": title,
        "resolution": family.resolution,
    }
    return {f"modelspec.{key}": value for key, value in (fields | dict(extra or {})).items()}


def with_hashes(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> dict[str, str]:
    """`metadata` with the three hashes of these tensors put in, or put right.

    `sshs_model_hash`: SHA-256 of everything after the header. `sshs_legacy_hash`: first 8 digits of the
    SHA-256 of bytes 0x100000 to 0x110000. Both of a file that has the `ss_*` metadata only.
    """
    trained = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    model_hash = hash_data(tensors)
    hashes = {"sshs_model_hash": model_hash, "sshs_legacy_hash": _legacy_hash(tensors, trained)}
    if any(key.startswith("modelspec.") for key in metadata):
        hashes["modelspec.hash_sha256"] = f"0x{model_hash}"
    return dict(metadata) | hashes


def _legacy_hash(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    position = 0
    for chunk in serialize(tensors, metadata):
        digest.update(chunk[max(0, _LEGACY_BEGIN - position) : max(0, _LEGACY_END - position)])
        position += len(chunk)
        if position >= _LEGACY_END:
            break
    return digest.hexdigest()[:8]
