"""One alpha for all layers of a file in kohya's naming, where diffusers would take another than a layer's own.

diffusers makes a PEFT configuration of such a file: the commonest alpha, and a pattern for each layer of another one.
For the attention of SDXL and its text encoders the pattern has a name that no module has:
`attn1.processor.to_q_lora.down.weight`. So these layers get the commonest alpha whatever their own is. Their files get
one alpha, and the rest is folded into the up matrices: the same update in every program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flame_train.io.lora_names import LoraComponent, LoraFamily

from .factors import LoraState
from .folding import alpha_record
from .kinds import ADAPTERS


def for_kohya(state: LoraState, family: LoraFamily) -> tuple[LoraState, dict[str, str]]:
    """Returns the adapters as a file in kohya's naming has them, and the metadata that undoes the folding.

    KeyError for a module that the family does not have.
    """
    written: dict[str, Mapping[str, Any]] = dict(state)
    by_path: dict[str, dict[str, Any]] = {}
    for component in family.components:
        modules = state.get(component.name, {})
        by_path[component.name] = {next(iter(component.modules[name])): f for name, f in modules.items()}
        if misread(component, {name: factors.alpha for name, factors in modules.items()}):
            alpha = _shared(component, modules)
            written[component.name] = {n: ADAPTERS[f.kind].files.with_alpha(f, alpha) for n, f in modules.items()}
    same = all(written[name] is modules for name, modules in state.items())
    return (state, {}) if same else (written, alpha_record({name: found for name, found in by_path.items() if found}))


def misread(component: LoraComponent, alphas: Mapping[str, float]) -> tuple[str, ...]:
    """The modules whose own alpha diffusers may replace by the file's commonest one, given each module's alpha."""
    counts = Counter(alphas.values()).most_common(2)
    if component.alpha_lost is None or len(counts) < 2:
        return ()
    (usual, most), (_, next_most) = counts
    lost = [name for name in alphas if component.alpha_lost.fullmatch(name)]
    return tuple(name for name in lost if most == next_most or alphas[name] != usual)


def _shared(component: LoraComponent, modules: Mapping[str, Any]) -> float:
    """Returns the commonest alpha of the modules whose own is lost, the largest of several."""
    assert component.alpha_lost is not None
    lost = [factors.alpha for name, factors in modules.items() if component.alpha_lost.fullmatch(name)]
    counts = Counter(alpha for alpha in lost if alpha) or Counter(f.alpha for f in modules.values() if f.alpha)
    return float(max(counts, key=lambda alpha: (counts[alpha], alpha)))
