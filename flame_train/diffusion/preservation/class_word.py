"""Differential output preservation, as ai-toolkit has it: a class keeps its looks while one of its kind is taught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flame_train.diffusion.preservation import Predictions, Preservation, mean_square
from flame_train.engine import Tensor
from flame_train.settings import field


class ClassWord(Preservation):
    """A row more for each sample: its caption with the class in the trigger's place, and the base model's prediction.

    The loss is the mean square of the difference of the two predictions.
    """

    name = "class"
    aka = ("differential", "diff_output_preservation")

    class_word: str = field(
        "",
        "what the trigger is one of, such as person; captions with it in the trigger's place are kept",
        aka=("diff_output_preservation_class",),
    )

    def problems(self, config: Any) -> Mapping[str, str]:
        if not self.class_word:
            return {"class_word": 'expected what the trigger is one of, such as "person", got nothing'}
        if not any([config.captions.trigger, *(one.captions.trigger for one in config.data.sets)]):
            return {"class_word": "expected captions.trigger with it, the word in whose place it stands, got none"}
        return {}

    def texts(self, caption: str, trigger: str) -> dict[str, str]:
        return {"class": caption.replace(trigger, self.class_word) if trigger else caption}

    def losses(self, predictions: Predictions) -> Tensor:
        return mean_square(predictions.trained("class"), predictions.base("class"))
