"""A second network that samples with the adapters of the first, and takes two buffers of a block each on the GPU.

Its blocks wait in host memory. Its other weights take the place of the first network's while it samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from flame_train.adapters.attach import Attached, at_strength, shared
from flame_train.config.schema import Config
from flame_train.engine import nn
from flame_train.models.common.model import Denoiser, Model
from flame_train.networks.streaming import StreamedWeights
from flame_train.networks.swapped_weights import Borrowed
from flame_train.run.check.check import storage_of


def load_second(model: Model, config: Config, denoiser: Denoiser, device: str) -> tuple[Denoiser, Borrowed]:
    """The loaded denoiser of `model`, which waits in host memory, and what lends it the place of the base's.

    Args:
        model: the model of `opened_for_samples`.
        config: the settings.
        denoiser: the loaded base, and the text encoders that run.
        device: "cuda" or "cpu".

    Returns:
        Both.
    """
    made = model.load_denoiser(
        device=device,
        dtype=config.train.precision,
        storage=storage_of(config.model.quantize, config.model.arithmetic),
        guidance_scale=config.loss.guidance_scale,
        streamed=model.network.named_blocks(),
    )
    return replace(made, text=denoiser.text), Borrowed(made.network, denoiser.network, _waiting(made.network))


def _waiting(network: Any) -> frozenset[int]:
    """The ids of the tensors that wait in host memory."""
    policy = next(iter(network.named_blocks().values())).weight_policy
    assert isinstance(policy, StreamedWeights)
    return policy.tensors


def sampling_with(
    attached: Attached, denoiser: Denoiser, second: tuple[Denoiser, Borrowed] | None, trained: Collection[str]
) -> tuple[Denoiser, Callable[[float], AbstractContextManager[nn.Module]]]:
    """The denoiser that samples images, and a context in which its adapters act so strongly.

    Args:
        attached: the adapters of the base.
        denoiser: the base.
        second: what `load_second` made; None: the base samples.
        trained: the keys of the text encoders that are trained.

    Returns:
        The denoiser, and a function from a strength to the context.
    """
    if second is None:
        return denoiser, lambda strength: at_strength(attached, strength)
    other, borrowed = second
    adapters = shared(attached, other.networks(trained))

    @contextmanager
    def acting(strength: float) -> Iterator[nn.Module]:
        with borrowed.in_place(), at_strength(adapters, strength) as model:
            yield model

    return other, acting
