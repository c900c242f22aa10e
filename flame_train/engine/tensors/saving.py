"""Tensors to a safetensors file and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flame_train.io.safetensors import SafetensorsFile, save_file

from ...errors import kind_of
from ..backend import get_backend
from ..mode import mode
from .tensor import Tensor, host_array


def save(tensors: Mapping[str, Any], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes Tensors or NumPy arrays by name to a safetensors file, whole or not at all.

    `flame.save(model.state_dict(), "net.safetensors")`; an optimizer's `state_dict()` is such a mapping too. Raises
    TypeError for other values, `OutputError` where the file cannot be written, or for a name that `load` refuses: x.pt.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "two.safetensors")
    >>> save({"a": np.ones(2, np.float32)}, path)
    >>> load(path)["a"].tolist()
    [1.0, 1.0]
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"save: expected tensors by name, such as model.state_dict(), got {kind_of(tensors)}")
    save_file(str(path), {name: host_array("save", name, value) for name, value in tensors.items()}, metadata)


def load(path: str | Path, device: str | None = None) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name, in the file's dtypes, on `device` or the default one.

    `model.load_state_dict(flame.load("net.safetensors"))`. Raises `ModelFileError` for a file that is damaged or of
    another kind: files that could run code, such as .pt, are never opened.
    """
    backend = get_backend(device or mode().device)
    with SafetensorsFile(path) as file:
        return {name: Tensor(backend.to_device(file.read(name))) for name in file.shapes}
