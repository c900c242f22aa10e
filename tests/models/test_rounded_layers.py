"""Which layers of a family are stored in int8 with a rotation: those that other programs' lists leave to it.

The lists are parts of names of what stays in 16 bits: those of silveroxides/convert_to_quant (`constants.py`, 2026-07),
which writes files for ComfyUI. What this package never rounds, such as embeddings, stands in them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.transformer import Krea2
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.models.wan.transformer import Wan, WanArch
from flame_train.models.zimage.transformer import ZImage, ZImageArch

LISTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "anima": (
        lambda: Anima(AnimaArch.tiny()),
        (
            *("net.blocks.0.", "net.blocks.1.adaln_modulation", "final_layer", "llm_adapter", "t_embedder"),
            "x_embedder",
        ),
    ),
    "chroma": (lambda: Chroma(ChromaArch.tiny()), ("distilled_guidance_layer", "final_layer", "img_in", "txt_in")),
    "flux2": (
        lambda: Flux2(Flux2Arch.tiny()),
        ("stream_modulation", "guidance_in", "time_in", "final_layer", "img_in", "txt_in"),
    ),
    "krea2": (lambda: Krea2(Krea2Arch.tiny()), ("firs", "las", "tml", "txtfusion", "last.modulatio", "tpro")),
    "qwenimage1": (
        lambda: QwenImage1(QwenImage1Arch.tiny()),
        ("time_text_embed", "img_in", "norm_out", "proj_out", "transformer_blocks.0.img_mod.1", "txt_in"),
    ),
    "wan": (
        lambda: Wan(WanArch.tiny()),
        ("text_embedding", "time_embedding", "time_projection", "head.head", "patch_embedding"),
    ),
    "zimage": (
        lambda: ZImage(ZImageArch.tiny()),
        ("x_embedder", "final_layer", "cap_embedder.1", "adaLN_modulation", "t_embedder", "x_embedder"),
    ),
}


@pytest.mark.parametrize("family", LISTS)
def test_the_layers_of_int8_with_a_rotation_are_those_that_a_published_list_leaves(family: str) -> None:
    make, kept = LISTS[family]
    network = make()
    linear = {n: m for n, m in network.named_modules() if type(m).__name__ == "Linear"}
    wanted = {n for n in linear if not any(part in f"net.{n}" for part in kept)}
    rotated = network.quantizable(rotated=True)
    assert {n for n, m in linear.items() if m in rotated} == wanted
    plain = network.quantizable()
    assert {layer: plain[layer] for layer in rotated} == rotated
    changed = {"anima", "krea2", "qwenimage1", "zimage"}
    assert (len(plain) > len(rotated)) == (family in changed)
