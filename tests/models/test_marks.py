"""Of all families exactly one has marks that fit a file, so no order among them decides: files of every layout."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import could_be, every_marks, identify, lora_could_be

Shapes = Mapping[str, tuple[int, ...]]
ENDS = {".lora_down.weight": lambda out, width: (4, width), ".lora_up.weight": lambda out, width: (out, 4)}
SHARED = {"flux2": ("flux", "qwenimage"), "flux3": ("flux",), "chroma": ("flux",), "qwenimage1": ("flux",)}
"""Families some of whose LoRAs, of attention alone, have another's names and widths."""


@cache
def published(family: str) -> dict[str, Shapes]:
    """The denoiser's shapes of each published size."""
    own = FAMILIES[family]
    return {
        size: networks()[own.denoiser].shapes() for size, networks in own.published.items() if not size.endswith("tiny")
    }


def layouts(family: str, shapes: Shapes) -> Iterator[Shapes]:
    """The names of each layout: those of the single file, and those of diffusers."""
    inside = {"llm_adapter.out_proj.weight": (1024, 1024)} if family == "anima" else {}
    yield {**shapes, **inside}
    names = importlib.import_module(f"flame_train.models.{family}.names")
    if family in ("sdxl", "sd15"):
        table = names.unet_from_diffusers(names.SDXL_LEVELS if family == "sdxl" else names.SD_LEVELS).inverse
    elif family == "sd3":
        table = names.mmdit_to_diffusers(names.depth_of(shapes))
    elif family == "qwenimage1":
        return
    else:
        table = names.transformer_to_diffusers()
    yield {name: source.made_shape(shapes) for name, source in table.pull(shapes).sources.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_family_alone_knows_a_published_network(family: str) -> None:
    for shapes in published(family).values():
        for stored in layouts(family, shapes):
            fitting = [mark for marks in every_marks() for mark in marks.networks if mark.fits(stored)]
            assert len(fitting) == 1, "of all marks of all families"
            assert could_be(identify(stored).family, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_family_alone_knows_a_lora(family: str) -> None:
    """Of all layers together; one layer by itself is known to this family, to none, or to one whose names it has."""
    denoiser = FAMILIES[family].denoiser
    spelled = spellings(FAMILIES[family].lora_names_in({}))
    for shapes in published(family).values():
        whole: dict[str, dict[str, tuple[int, ...]]] = {}
        seen = set()
        for name, place in spelled.items():
            weight = shapes.get(f"{place.module}.weight", ())
            if place.component != denoiser or len(weight) != 2 or place.path:
                continue
            pair = {f"{name}{end}".replace(".", "_"): made(*weight) for end, made in ENDS.items()}
            whole.setdefault(place.dialect, {}).update(pair)
            template = re.sub(r"\d+", "#", name)
            if template not in seen:
                seen.add(template)
                assert_one(family, pair, alone=True)
        for pairs in whole.values():
            assert_one(family, pairs)


def assert_one(family: str, flat: Shapes, alone: bool = False) -> None:
    names = "\n".join(flat)
    found = [model for marks in every_marks() if (model := marks.lora(flat, names)) is not None]
    assert len(found) == 1 or (alone and not found), (found, names)
    assert all(lora_could_be(model, family) or (alone and model in SHARED.get(family, ())) for model in found), names


@pytest.mark.parametrize("family", FAMILIES)
def test_one_family_alone_is_written_down(family: str) -> None:
    own = FAMILIES[family].lora_names_in({})
    for text in (own.base_version, own.architecture.lower()):
        found = [model for marks in every_marks() if (model := marks.by_metadata(text)) is not None]
        assert len(found) == 1
        assert could_be(found[0], family)
