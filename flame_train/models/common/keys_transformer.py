"""A diffusion transformer as a part of a model's files."""

from __future__ import annotations

import re

from flame_train.io.resolve import Component, Layout


def transformer_component(*layouts: Layout, unused: str = r"(?!)") -> Component:
    """The transformer in these layouts, below the prefixes of single files, diffusers folders and ComfyUI's files.

    What marks a scaled fp8 file, or serves products in fp8, plays no part, nor what the pattern `unused` fits.
    """
    prefixes = ("model.diffusion_model.", "transformer/", "diffusion_model.")
    return Component("transformer", prefixes, layouts, re.compile(rf"scaled_fp8|.*\.scale_input|{unused}"))
