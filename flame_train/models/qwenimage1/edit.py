"""Which Qwen-Image-Edit a checkpoint is. Its tensors have the names and shapes of Qwen-Image 1's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from flame_train.errors import ConfigError
from flame_train.io.weights import open_weights
from flame_train.models.common.family import Opening, network_of, published_name, stated_in
from flame_train.models.qwenimage1.names import ZERO_COND
from flame_train.models.qwenimage1.transformer import QwenImage1
from flame_train.networks.files.part import Part

Edit = Literal["", "first", "2509", "2511"]
PLUS: Final = ("2509", "2511")
"""Those that look at any number of control images. `first` looked at one, in another way."""
_CALLED: Final = re.compile(r"edit(?:[-_. ]?(?:plus|(2509|2511)))?")


def edit_of(transformer: Part, opening: Opening) -> Edit:
    """Returns which one a transformer is, by a tensor, its folder and its name, and `model.qwen_edit`.

    Raises ConfigError for a key that contradicts what is known.
    """
    key, told = opening.model.qwen_edit, _told(transformer, opening.base)
    if key == "auto":
        return told
    if told in PLUS and told != key:
        raise ConfigError(
            f'model.qwen_edit: expected "{told}" for {opening.base}, whose tensors, folder or name say so, '
            f'got "{key}"; remove it'
        )
    return key


def _told(transformer: Part, base: Path) -> Edit:
    zero_cond = _zero_cond(transformer)
    if zero_cond:
        return "2511"
    pipeline = stated_in(base, "model_index.json").values.get("_class_name")
    called = _CALLED.search(published_name(base))
    if called is not None and called[1] == "2511" and zero_cond is None:
        return "2511"
    if pipeline == "QwenImageEditPlusPipeline" or (called is not None and (called[1] or "plus" in called[0])):
        return "2509"
    return "first" if called is not None or pipeline == "QwenImageEditPipeline" else ""


def _zero_cond(transformer: Part) -> bool | None:
    """Says whether control images are at time 0, by a tensor or the folder's `config.json`; None: neither says so."""
    told = network_of(transformer, QwenImage1).arch.zero_cond
    if told is not None or not transformer.path.exists():
        return told
    with open_weights(transformer.path) as weights:
        return True if any(name.endswith(ZERO_COND) for name in weights.names) else None
