"""A concept slider of texts (Gandikota et al., arXiv 2311.12092): an axis between two prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flame_train.diffusion.preservation import Predictions, Preservation, mean_square
from flame_train.engine import Tensor
from flame_train.settings import field


class Slider(Preservation):
    """In place of the images' loss, with s = 1 or -1 the strength of the adapters in a micro-batch:

    |trained_s(target) - (base(target) + s guidance (base(positive) - base(negative)))|^2. Images give the latents.
    """

    name = "slider"
    instead = True
    per_sample_sign = True

    positive: str = field("", "the prompt at the end of strength 1")
    negative: str = field("", "the prompt at the end of strength -1")
    target: str = field("", "the prompt that is moved; empty: one without words", aka=("target_class",))
    guidance: float = field(3.0, "how far the ends lie from the middle", gt=0, le=100, aka=("guidance_strength",))

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.positive == self.negative:
            return {"positive": f"expected another prompt than preservation.negative, got {self.positive!r} for both"}
        if any(one.regularization for one in config.data.sets):
            return {"positive": "expected no set with regularization: a slider learns no image; remove those sets"}
        return {}

    def texts(self, caption: str, trigger: str) -> dict[str, str]:
        return {"target": self.target, "positive": self.positive, "negative": self.negative}

    def losses(self, predictions: Predictions) -> Tensor:
        moved = (predictions.base("positive") - predictions.base("negative")) * (predictions.strength * self.guidance)
        return mean_square(predictions.trained("target"), predictions.base("target") + moved)
