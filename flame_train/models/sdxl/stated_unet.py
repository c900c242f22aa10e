"""What a folder states of a UNet beside its weights, and shapes do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flame_train.errors import ModelFileError
from flame_train.networks.files.stated import Stated

AS_SDXL: Final[dict[str, object]] = {
    **{"act_fn": "silu", "downsample_padding": 1, "conv_in_kernel": 3, "conv_out_kernel": 3},
    **{"center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0},
    **{"time_embedding_type": "positional", "time_embedding_act_fn": None, "timestep_post_act": None},
    **{"resnet_time_scale_shift": "default", "resnet_skip_time_act": False, "resnet_out_scale_factor": 1.0},
    **{"mid_block_scale_factor": 1, "only_cross_attention": False, "dual_cross_attention": False},
    **{"attention_type": "default", "cross_attention_norm": None, "encoder_hid_dim_type": None},
    **{"class_embed_type": None, "addition_embed_type": "text_time", "addition_time_embed_dim": 256},
}
"""What diffusers' UNet may state and shapes do not tell; what else it states is read, or follows from shapes."""


def stated_head_dim(stated: Stated, widths: Sequence[int], depths: Sequence[int]) -> int:
    """The width of a head, of which there is one in all levels with transformers; 0 if the folder does not state it.

    diffusers calls the number of heads of each level `attention_head_dim`. Raises ModelFileError for several widths.
    """
    heads = stated.values.get("num_attention_heads") or stated.values.get("attention_head_dim")
    if heads is None:
        return 0
    each = heads if isinstance(heads, list) else [heads] * len(widths)
    levels = zip(widths, each, depths, strict=False)
    found = {width // n for width, n, depth in levels if depth and isinstance(n, int) and n > 0}
    if len(found) != 1:
        raise ModelFileError(
            f"{stated.path}: attention_head_dim: expected the numbers of heads of one width, found {heads!r}: such a "
            "UNet is not supported here"
        )
    return found.pop()
