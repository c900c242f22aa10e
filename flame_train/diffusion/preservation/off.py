"""No preservation: a step trains the images' own loss alone."""

from __future__ import annotations

from flame_train.diffusion.preservation import Preservation


class Off(Preservation):
    """Nothing further."""

    name = "off"
    active = False

    def texts(self, caption: str, trigger: str) -> dict[str, str]:
        return {}
