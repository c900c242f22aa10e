"""Adapter kinds that a config can choose: each is one file of this folder."""

from __future__ import annotations

from flame_train.adapters.factors import Factors
from flame_train.settings import Table, entries_in

from .kind import Adapter, AdapterKind, Layer, Make

ADAPTERS: Table[AdapterKind] = Table(
    "kind", "kind of adapter", entries_in(__name__, AdapterKind), "lora", aka=("network_module", "network_type")
)

__all__ = ["ADAPTERS", "Adapter", "AdapterKind", "Factors", "Layer", "Make"]
