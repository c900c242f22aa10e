"""Flux.1 dev and schnell: what their files, captions and conditioning are, for the training pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.diffusion.flow import NO_SHIFT, dynamic_sigmas, resolution_shift
from flame_train.engine import Tensor
from flame_train.engine.tensor import tensor
from flame_train.models.flux import DoubleBlock, Flux
from flame_train.models.keys import flux as keys
from flame_train.models.loading_flux import FLUX_FILES
from flame_train.models.recompute import Block, Recompute, run_again
from flame_train.models.text_clip import encode_clip
from flame_train.models.text_t5 import encode_prompts
from flame_train.models.vae import VaeArch
from flame_train.training.family import Load, Usual
from flame_train.training.step import Denoise

from .flow import DOUBLE_KEEPS, GATES_KEEP, FlowFamily, Ids, gates_learn, joint_activations

_PAD = 49407  # CLIP-L's
_SHIFT = resolution_shift()

_ATTENTION: Final = ("double_blocks.*_attn.qkv", "double_blocks.*_attn.proj", "single_blocks.*.linear1")
_MLP: Final = ("double_blocks.*_mlp.[02]", "single_blocks.*.linear2")

PRESETS: Final[Presets] = MappingProxyType(
    {
        "attention": _ATTENTION,
        "attention+mlp": (*_ATTENTION, *_MLP),
        "full": ("double_blocks.*", "single_blocks.*"),
    }
)
"""114, 228 and 304 layers in dev. In a single-stream block queries, keys and values are one layer with the
MLP's first, so `attention` has that too; `full` is every linear layer in the blocks, modulation included, as sd-scripts
has it."""


def _conditioning(networks: Mapping[str, Any], ids: Ids) -> dict[str, Tensor]:
    """`t5` (1, T, 4096) and CLIP-L's `pooled` (1, 768)."""
    _, pooled = encode_clip(networks["text_encoder"], ids["text_encoder"])
    return {"t5": encode_prompts(networks["text_encoder_2"], ids["text_encoder_2"]), "pooled": pooled}


def _denoise(transformer: Flux, guidance: float) -> Denoise:
    """Times are noise levels in (0, 1). A model that knows a guidance is told this one."""
    told = np.full((1,), guidance, np.float32)
    fixed = tensor(told, device=transformer.img_in.weight.device) if transformer.arch.guidance else None

    def denoise(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        of_each = None if fixed is None else fixed.expand(x.shape[0])
        out: Tensor = transformer(x, t * 1000.0, cond["t5"], cond["pooled"], of_each)
        return out

    return denoise


# as published: dev is told its guidance, schnell was distilled to four steps without any
_DEV, _SCHNELL = Usual(28, 3.5), Usual(4, 1.0)
_TOLD = ("time_in.", "vector_in.", "guidance_in.")
_SINGLE_KEEPS: Mapping[Recompute, int] = {"nothing": 11, "feed_forward": 11, "blocks": 1, "blocks_offloaded": 0}


def _activations(transformer: Flux, text: int, load: Load) -> int:
    """A single block's first layer is 7 times as wide as the stream: what passes by is mostly its gradients."""
    arch, tokens = transformer.arch, load.bucket[0] * load.bucket[1] // 256 + text
    of_text = text / tokens

    def learns(maker: str) -> bool:
        return gates_learn(load, maker, _TOLD)

    def keeps(name: str, block: Block, how: Recompute) -> float:
        if isinstance(block, DoubleBlock):
            gates = (1 - of_text) * learns(f"{name}.img_mod.lin") + of_text * learns(f"{name}.txt_mod.lin")
            return DOUBLE_KEEPS[how] + GATES_KEEP[how] * gates
        return _SINGLE_KEEPS[how] + (not run_again(how)) * learns(f"{name}.modulation.lin")

    blocks = transformer.blocks().items()
    kept = sum(keeps(name, block, load.of(name)) for name, block in blocks)
    whole = sum(keeps(name, block, "nothing") for name, block in blocks)
    passing = 30 + load.made_again(11, whole - kept)
    return joint_activations(load, kept, passing, arch.width, arch.head_dim, tokens)


def _sigmas(transformer: Any, steps: int, tokens: int) -> np.ndarray[Any, Any]:
    """dev's follow the resolution, schnell's are not shifted."""
    return dynamic_sigmas(steps, (_SHIFT if transformer.arch.guidance else NO_SHIFT)(tokens))


FLUX = FlowFamily(
    name="flux",
    presets=PRESETS,
    files=FLUX_FILES,
    clip_tokens=0,
    published_vae=VaeArch.flux(),
    encoders_of={"text_encoder": "clip_l", "text_encoder_2": "t5"},
    clips={"text_encoder": _PAD},
    t5="text_encoder_2",
    t5_tokens=lambda transformer: 512 if transformer.arch.guidance else 256,
    conditioning=_conditioning,
    denoise=_denoise,
    lora_family=lambda transformer: keys.lora_family(transformer.arch.guidance),
    lora_names_in=lambda shapes: keys.lora_family(),
    shift=_SHIFT,
    sigmas=_sigmas,
    activations=_activations,
    guides_itself=lambda transformer: transformer.arch.guidance,
    drawn=lambda transformer: _DEV if transformer.arch.guidance else _SCHNELL,
    positions=lambda transformer: 0,
    arrays_of={"clip_l": ("pooled",), "t5": ("t5",)},
    foreign=(
        "model.clip_g", "data.clip_g_dropout", "model.prediction", "data.max_tokens", "loss.snr_gamma",
        "loss.zero_terminal_snr", "sample.sampler",
    ),
)  # fmt: skip
