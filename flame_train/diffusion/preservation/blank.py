"""Blank-prompt preservation, as ai-toolkit has it: what the model makes of no prompt stays as it was."""

from __future__ import annotations

from flame_train.diffusion.preservation import Predictions, Preservation, mean_square
from flame_train.engine import Tensor


class Blank(Preservation):
    """A row more for each sample: the empty caption, and the base model's prediction for it.

    The loss is the mean square of the difference of the two predictions.
    """

    name = "blank"
    aka = ("blank_prompt_preservation",)

    def texts(self, caption: str, trigger: str) -> dict[str, str]:
        return {"blank": ""}

    def losses(self, predictions: Predictions) -> Tensor:
        return mean_square(predictions.trained("blank"), predictions.base("blank"))
