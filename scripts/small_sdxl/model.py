"""The small SDXL: its architectures, its weights before training, and its way into and out of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from flame_train.engine import nn
from flame_train.io.safetensors import save_file
from flame_train.models.sdxl.names import SDXL_FILES
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.names import clip_from_openclip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.clip.tokenizer import ClipTokenizer

Array = np.ndarray[Any, Any]

TEXT_WIDTH, TEXT_LAYERS = 32, 3
TOKENIZER = ClipTokenizer(49407)  # pads as CLIP-L's does
_BEGIN, _END, _LENGTH = 49406, 49407, 77
_LOG_VARIANCE = -8.0
_PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}


@dataclass(frozen=True, slots=True)
class Networks:
    """The four networks; 7 million weights, of which 3.2 million are CLIP's vocabulary."""

    unet: UNet
    vae: Vae
    text_encoder: ClipTextEncoder
    text_encoder_2: ClipTextEncoder

    @classmethod
    def load(cls, path: Path, device: str) -> Self:
        """From a checkpoint, in fp32."""
        return cls(**{name: SDXL_FILES.load(path, name, device=device, dtype="float32") for name in _PREFIXES})

    def named(self) -> dict[str, nn.Module]:
        """Each by its component name."""
        return {name: getattr(self, name) for name in _PREFIXES}


def build(seed: int, device: str) -> Networks:
    """Fresh networks with random weights. Every residual branch of the UNet begins at zero."""
    unet = replace(UNetArch.tiny(32, 2 * TEXT_WIDTH, TEXT_WIDTH), channel_mult=(1, 2, 2), transformer_depth=(0, 1, 1))
    clip = ClipArch(TEXT_WIDTH, TEXT_LAYERS, 2, 4 * TEXT_WIDTH, "quick_gelu", None)
    bigg = replace(clip, activation="gelu", projection=TEXT_WIDTH)
    made = Networks(UNet(unet), Vae(VaeArch.tiny(16)), ClipTextEncoder(clip), ClipTextEncoder(bigg))
    rng = np.random.default_rng(seed)
    for network in made.named().values():
        network.init(rng, device=device)
    for name, weight in made.unet.weights():
        if name.endswith(("out_layers.3.weight", "proj_out.weight", "out.2.weight")):
            weight.data[...] = 0.0
    scale = made.vae.arch.scaling_factor  # latents have a spread of 1 / scale between encoder and decoder
    made.vae.encoder.conv_out.weight.data[...] /= scale
    made.vae.decoder.conv_in.weight.data[...] *= scale
    for encoder in (made.text_encoder, made.text_encoder_2):
        encoder.text_model.embeddings.token_embedding.weight.data[...] *= 20.0  # to a spread of 0.4: words tell apart
    return made


def token_ids(captions: Sequence[str]) -> tuple[Array, Array]:
    """(N, 77) int32 for each of the two encoders."""
    first = np.full((len(captions), _LENGTH), _END, np.int32)
    second = np.zeros_like(first)  # bigG pads with 0
    for i, caption in enumerate(captions):
        row = [_BEGIN, *[n for word in caption.split() for n in _word(word)][: _LENGTH - 2], _END]
        first[i, : len(row)] = second[i, : len(row)] = row
    return first, second


@lru_cache
def _word(word: str) -> list[int]:
    """CLIP's tokens of a word: they never reach across a space, and there are few words."""
    return TOKENIZER.encode(word)


def normalise_latents(vae: Vae, mean: Array, std: Array) -> None:
    """Folds a shift and a scale a channel into the autoencoder, so that what is diffused has mean 0 and spread 1.

    `mean` and `std` (Z,) are those of its latents before the published scaling factor, which then fits. The
    latents' own noise, which was not trained, is set to nearly nothing.
    """
    z = vae.arch.latent_channels
    gain = (1.0 / (std * vae.arch.scaling_factor)).astype(np.float32)
    q, p = vae.quant_conv, vae.post_quant_conv
    xp = q.weight.backend.xp
    factor, shift = xp.asarray(gain), xp.asarray(mean.astype(np.float32))
    p.bias.data[...] += p.weight.data[:, :, 0, 0] @ shift
    p.weight.data[...] = p.weight.data / factor[None, :, None, None]
    q.weight.data[:z] *= factor[:, None, None, None]
    q.bias.data[:z] = (q.bias.data[:z] - shift) * factor
    q.weight.data[z:], q.bias.data[z:] = 0.0, _LOG_VARIANCE


def quiet_unused_words(weights: dict[str, Array], used: Array, seed: int) -> None:
    """Gives tokens that no caption has a vector of random signs as large as the trained ones: it compresses well."""
    name = "text_model.embeddings.token_embedding.weight"
    table = weights[name]
    size = float(np.sqrt(np.mean(np.square(table[used]))))
    signs = np.random.default_rng(seed).choice(np.array([-size, size], np.float32), table.shape)
    signs[used] = table[used]
    weights[name] = signs


def write(path: Path, networks: Mapping[str, Mapping[str, Array]], title: str) -> int:
    """Writes weights by component as one fp16 file under the published single file's names; returns their number."""
    tensors = {}
    for component, weights in networks.items():
        own = _openclip(weights) if component == "text_encoder_2" else weights
        for name, array in own.items():
            tensors[_PREFIXES[component] + name] = np.ascontiguousarray(array, np.float16)
    save_file(path, tensors, {"modelspec.title": title})
    return sum(array.size for array in tensors.values())


class _Arrays:
    """Named arrays as a source for a key map."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def read(self, name: str) -> Array:
        return self._arrays[name]


def _openclip(weights: Mapping[str, Array]) -> dict[str, Array]:
    sources = clip_from_openclip().inverse.pull(weights).sources
    return {name: source.read(_Arrays(weights)) for name, source in sources.items()}
