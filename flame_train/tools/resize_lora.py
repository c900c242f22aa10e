"""`flame-train resize`: a LoRA of a lower rank, nearest to the one in a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.nearest import Truncation, truncate
from flame_train.errors import ConfigError, ModelFileError
from flame_train.tools.lora_files import Errors, read_source, same_naming, split_metadata, write_lora


def resize(source: Path, target: Path, want: Truncation, force: bool = False) -> dict[str, Any]:
    """Writes the LoRA nearest to `source`, module by module; alpha / rank, names and number format stay.

    Modules of no higher rank than wanted stay bit for bit.

    Args:
        source: a LoRA in any dialect.
        want: the rank, or the error that a module may have.

    Returns:
        The report: ranks, the error of all modules together, and the largest of one.

    Raises:
        ConfigError: no module loses anything.
        ModelFileError: the file is no LoRA of a supported family, or of another kind of adapter.
        NonFiniteError: it holds NaN.
        OutputError: `target` exists and `force` is false.
    """
    family, lora = read_source(source, target, force)
    errors = Errors()
    loras: dict[str, dict[str, LoraFactors]] = {}
    ranks: Counter[int] = Counter()
    for component, modules in lora.state.items():
        for module, factors in modules.items():
            if not isinstance(factors, LoraFactors):
                raise ModelFileError(
                    f"{source}: {component} {module} is of kind {factors.kind}, whose rank cannot be cut; "
                    "`flame-train merge --to lora` makes a LoRA of it"
                )
            ranks[factors.rank] += 1
            loras.setdefault(component, {})[module] = errors.add(f"{component} {module}", truncate(factors, want))
    if all(loras[part][name] is factors for part, modules in lora.state.items() for name, factors in modules.items()):
        raise ConfigError(
            f"{source}: nothing can be cut: its highest rank is {max(ranks)}, and each module has as few as that"
        )
    metadata, dropped = split_metadata(lora.metadata)
    tensors = write_lora(target, loras, family, same_naming(lora.dialects), metadata)
    return {
        "source": str(source),
        "target": str(target),
        "tensors": tensors,
        "ranks_before": dict(sorted(ranks.items())),
        **errors.as_dict(),
        "dropped_metadata": list(dropped),
    }
