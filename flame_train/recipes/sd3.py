"""SD3 and SD3.5: what their files, captions and conditioning are, for the training pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.diffusion.flow import NO_SHIFT, static_sigmas
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.models.keys import sd3 as keys
from flame_train.models.loading_sd3 import SD3_FILES
from flame_train.models.mmdit_sd3 import Mmdit
from flame_train.models.recompute import Block, Recompute, run_again
from flame_train.models.text_clip import encode_clip
from flame_train.models.text_sd3 import joined_context
from flame_train.models.text_t5 import encode_prompts
from flame_train.models.vae import VaeArch
from flame_train.training.family import Load, Usual
from flame_train.training.step import Denoise

from .flow import CLIP_TOKENS, DOUBLE_KEEPS, GATES_KEEP, FlowFamily, Ids, gates_learn, joint_activations

_CLIP_L_PAD, _CLIP_G_PAD = 49407, 0
_SHIFT = 3.0  # of the published models' sampling

_ATTENTION: Final = ("joint_blocks.*.attn.qkv", "joint_blocks.*.attn.proj", "joint_blocks.*.attn2.*")
_MLP: Final = ("joint_blocks.*.mlp.fc[12]",)
PRESETS: Final[Presets] = MappingProxyType(
    {
        "attention": _ATTENTION,
        "attention+mlp": (*_ATTENTION, *_MLP),
        "full": ("joint_blocks.*",),
    }
)
"""`full` is every linear layer of the blocks, modulation included, as sd-scripts has it."""


def _conditioning(networks: Mapping[str, Any], ids: Ids) -> dict[str, Tensor]:
    """`clip_l` (1, 77, 768), `clip_g` (1, 77, 1280), `t5` (1, T, 4096), `pooled_l` (1, 768), `pooled_g` (1, 1280)."""
    made = {"t5": encode_prompts(networks["text_encoder_3"], ids["text_encoder_3"])}
    for name, component in (("l", "text_encoder"), ("g", "text_encoder_2")):
        made[f"clip_{name}"], made[f"pooled_{name}"] = encode_clip(networks[component], ids[component])
    return made


def _denoise(transformer: Mmdit, guidance: float) -> Denoise:
    """Times are noise levels in (0, 1). The model is told no guidance."""

    def denoise(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        context = joined_context(cond["clip_l"], cond["clip_g"], cond["t5"])
        pooled = F.cat([cond["pooled_l"], cond["pooled_g"]], dim=-1)
        out: Tensor = transformer(x, t * 1000.0, context, pooled)
        return out

    return denoise


_TOLD = ("t_embedder.", "y_embedder.")
_DUAL_KEEPS = 6  # an attention of its own more: queries, keys and values, the first two normed, and what it found


def _activations(transformer: Mmdit, text: int, load: Load) -> int:
    arch, image = transformer.arch, load.bucket[0] * load.bucket[1] // 256
    of_image = image / (image + text)

    def keeps(name: str, block: Block, how: Recompute) -> float:
        drawn = of_image * gates_learn(load, f"{name}.x_block.adaLN_modulation.1", _TOLD)
        read = (1 - of_image) * gates_learn(load, f"{name}.context_block.adaLN_modulation.1", _TOLD)
        gates = drawn + read * block.context_block.goes_on
        of_dual = block.x_block.dual * (_DUAL_KEEPS * of_image + drawn)
        return DOUBLE_KEEPS[how] + GATES_KEEP[how] * gates + (0 if run_again(how) else of_dual)

    blocks = transformer.blocks().items()
    kept = sum(keeps(name, block, load.of(name)) for name, block in blocks)
    whole = sum(keeps(name, block, "nothing") for name, block in blocks)
    passing = 15 + load.made_again(13, whole - kept)
    return joint_activations(load, kept, passing, arch.width, arch.head_dim, image + text)


def _sigmas(transformer: Any, steps: int, tokens: int) -> np.ndarray[Any, Any]:
    return static_sigmas(steps, _SHIFT)


def _drawn(transformer: Mmdit) -> Usual:
    """The guidance on the models' cards: SD3 medium 7, SD3.5 medium 4.5, SD3.5 large 3.5.

    Large turbo, which wants 4 steps and none, has the shapes of large.
    """
    arch = transformer.arch
    return Usual(28, 7.0 if not arch.qk_norm else 4.5 if arch.dual else 3.5)


SD3 = FlowFamily(
    name="sd3",
    presets=PRESETS,
    files=SD3_FILES,
    clip_tokens=CLIP_TOKENS,
    published_vae=VaeArch.sd3(),
    encoders_of={"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5"},
    clips={"text_encoder": _CLIP_L_PAD, "text_encoder_2": _CLIP_G_PAD},
    t5="text_encoder_3",
    t5_tokens=lambda transformer: 256,
    conditioning=_conditioning,
    denoise=_denoise,
    lora_family=lambda transformer: keys.lora_family(transformer.arch.depth, transformer.arch.dual),
    lora_names_in=keys.lora_family_of,
    shift=NO_SHIFT,
    sigmas=_sigmas,
    activations=_activations,
    guides_itself=lambda transformer: False,
    drawn=_drawn,
    positions=lambda transformer: transformer.arch.positions,
    arrays_of={"clip_l": ("clip_l", "pooled_l"), "clip_g": ("clip_g", "pooled_g"), "t5": ("t5",)},
    foreign=(
        "model.prediction", "data.max_tokens", "loss.snr_gamma", "loss.zero_terminal_snr", "loss.guidance",
        "sample.sampler",
    ),
)  # fmt: skip
