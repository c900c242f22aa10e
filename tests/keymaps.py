"""Tables of names, on arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Arrays(dict[str, Array]):
    """Named arrays that are read as a file's are."""

    def read(self, name: str) -> Array:
        return self[name]


def through(table: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that the table makes of these, each of which it knows."""
    pulled = table.pull(arrays)
    assert pulled.unknown == ()
    return {name: np.array(source.read(Arrays(arrays))) for name, source in pulled.sources.items()}


def weights_of(model: Any) -> dict[str, Array]:
    """A network's weights by name."""
    return {name: weight.numpy() for name, weight in model.weights()}


def fill(twin: Any, model: Any, table: Any = None, dtype: str | None = None) -> Any:
    """Copies a network's weights into a torch module, through the table native -> the module's names."""
    import torch

    made = weights_of(model) if table is None else through(table, weights_of(model))
    values = {name: torch.from_numpy(np.array(array, dtype, order="C")) for name, array in made.items()}
    twin.load_state_dict(values, strict=True)
    return twin.eval()
