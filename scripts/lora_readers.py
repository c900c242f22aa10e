"""Writes the table by which `flame-train verify` knows the LoRA keys that ComfyUI, Forge and diffusers take.

    python scripts/lora_readers.py [--comfyui CHECKOUT 2025-10-12] [--forge CHECKOUT 2025-06-26]

Each program's own functions are called: on the weights' names of each family they give its key map, and on a LoRA of
one module they tell which of its tensors they take. diffusers is the installed one. Nothing of them is kept but names.
What the table says of a program that is not named here stays.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from flame_train.adapters.dialects import spellings, split_key
from flame_train.families import FAMILY_TITLES, family_data
from flame_train.models.registry import FAMILIES
from flame_train.tools.verify import STYLES, TABLE, template

KEYS = Path(__file__).parents[1] / "tests" / "golden" / "keys"
LISTS = {  # family -> its published models: the list of names, and what a program's config says of it
    "sdxl": {
        "sdxl_base_single_file": {
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
        }
    },
    "sd15": {
        "sd15": {
            "num_res_blocks": [2, 2, 2, 2],
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
            "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
            "transformer_depth_middle": 1,
        }
    },
    "sd3": {
        "sd3_medium_single_file": {"depth": 24},
        "sd35_medium_single_file": {"depth": 24},
        "sd35_large_single_file": {"depth": 38},
    },
    "flux": {"flux_dev_single_file": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072}},
}
REPOSITORY = {
    "sdxl": "stable-diffusion-xl",
    "sd15": "stable-diffusion-v1-5",
    "sd3": "stable-diffusion-3",
    "flux": "FLUX.1-dev",
}
READ = {"version": "0.38.1", "date": "2026-11-28"}
"""The ComfyUI in which `[comfyui]` of a `family.toml` was read where it says no other, and when.

It was read in its `model_lora_keys_unet`, and in the tables of names that this asks. Every family has
`diffusion_model.` and `lora_unet_` before its own paths.
"""
NOT_MAPPED = re.compile(r"(distilled_guidance_layer|time_guidance_embed|(double|single)_stream_modulation\w*)\..*")
"""Paths of diffusers that its table for Flux, FLUX.2 and Chroma leaves out."""
SIZE = 4
UPS = (".lora_up.weight", ".lora_B.weight", "lora_B.default.weight", ".up.weight")
OUTPUT = ".self_attn.out_proj"
OWN_ENDS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector", ".lora_magnitude_vector.weight")


def names(listed: str) -> dict[str, list[int]]:
    """The names of a published model's tensors, with their shapes: of a list, or of a network of that size."""
    for own in FAMILIES.values():
        if listed in own.published:
            return {name: list(shape) for name, shape in own.published[listed]()[own.denoiser].shapes().items()}
    with gzip.open(KEYS / f"{listed}.json.gz") as stream:
        found: dict[str, list[int]] = json.load(stream)
        return found


def denoiser(listed: str) -> dict[str, None]:
    """The names below `diffusion_model.` as a program's model has them."""
    found = [name.removeprefix("model.diffusion_model.") for name in names(listed) if "first_stage" not in name]
    return {f"diffusion_model.{n}": None for n in found if not n.startswith(("conditioner.", "text_encoders."))}


def text_encoders(family: str) -> dict[str, None]:
    """The names of a program's text encoders."""
    lists = {"clip_l": "clip_l", "clip_g": "sdxl_diffusers_text_encoder_2", "t5xxl": "t5xxl_encoder"}
    used = {"sdxl": ("clip_l", "clip_g"), "sd3": ("clip_l", "clip_g", "t5xxl"), "flux": ("clip_l", "t5xxl")}
    used |= {"sd15": ("clip_l",)}
    return {f"{part}.transformer.{name}": None for part in used[family] for name in names(lists[part])}


def arrays(ends: tuple[str, ...], rows: int = SIZE) -> dict[str, torch.Tensor]:
    """Tensors of one module, whose weight has so many rows, by how their names end."""
    made = {end: torch.ones(rows if end.endswith(UPS) else SIZE, SIZE) for end in ends}
    return made | ({".alpha": torch.tensor(float(SIZE))} if ".alpha" in ends else {})


Taken = dict[str, dict[str, list[str]]]
"""Style -> module's template -> the ends that are taken."""


def by_key_map(maps: dict[str, Any], load: Callable[[dict[str, Any], dict[str, Any]], set[str]]) -> Taken:
    """What a program takes that looks for each module of its key map."""
    taken: Taken = {}
    modules = sorted({template(name) for name in maps})
    for style, ends in STYLES.items():
        lora = {f"x{end}": array for end, array in arrays(ends).items()}
        found = [key.removeprefix("x") for key in lora.keys() - load(lora, {"x": "y.weight"})]
        if found:
            taken[style] = dict.fromkeys(modules, sorted(found))
    return taken


def stubbed(folder: Path, modules: dict[str, Any]) -> None:
    """Makes a checkout's modules importable, without those that need a GPU or read the command line."""
    sys.path.insert(0, str(folder))
    for name, stub in modules.items():
        sys.modules[name] = stub
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(importlib.import_module(parent), last, stub)


def comfyui(folder: Path) -> dict[str, Taken]:
    bases = types.ModuleType("comfy.model_base")
    bases.__getattr__ = lambda name: vars(bases).setdefault(name, type(name, (), {}))  # type: ignore[method-assign]
    mocked = ("comfy.model_management", "comfy.cli_args", "comfy.checkpoint_pickle", "einops")
    stubbed(folder, {name: MagicMock(name=name) for name in mocked} | {"comfy.model_base": bases})
    import comfy.lora as own

    def load(lora: dict[str, Any], to_load: dict[str, Any]) -> set[str]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        own.load_lora(lora, to_load)
        logging.getLogger().removeHandler(handler)
        return {text.removeprefix("lora key not loaded: ") for text in records}

    found = {}
    for family, models in LISTS.items():
        maps: dict[str, Any] = {}
        for listed, config in models.items():
            kind = getattr(bases, {"sd3": "SD3", "flux": "Flux"}.get(family, "SDXL"))
            model = kind()
            model.state_dict = lambda listed=listed: denoiser(listed)
            model.model_config = SimpleNamespace(unet_config=config)
            own.model_lora_keys_unet(model, maps)
        own.model_lora_keys_clip(SimpleNamespace(state_dict=lambda family=family: text_encoders(family)), maps)
        found[family] = by_key_map(maps, load)
    return found


def comfyui_read(table: dict[str, Any]) -> None:
    """Adds the families that were read to ComfyUI's table. Endings are taken as those of Flux are."""
    for family in FAMILY_TITLES:
        if (read := family_data(family).get("comfyui")) is None:
            continue
        dotted, flat = read["dotted"], read["flat"]
        paths = FAMILIES[family].lora_names_in({}).components[0].modules
        keys = [
            spelled for own in paths for spelled in (f"diffusion_model.{own}", f"lora_unet_{own.replace('.', '_')}")
        ]
        theirs = [path for each in paths.values() for path in each if not NOT_MAPPED.fullmatch(path)]
        keys += [prefix + path for path in theirs for prefix in dotted]
        keys += [prefix + path.replace(".", "_") for path in theirs for prefix in flat]
        modules = sorted({template(key) for key in keys})
        if modules not in table["modules"]:
            table["modules"].append(modules)
        number = table["modules"].index(modules)
        table["families"][family] = {
            style: [[ends, number] for ends, _ in groups] for style, groups in table["families"]["flux"].items()
        }
        table.setdefault("read", {})[family] = read.get("read", READ)


def forge(folder: Path) -> dict[str, Taken]:
    stubbed(folder, {"backend": MagicMock(name="backend")})
    spec = importlib.util.spec_from_file_location("forge_lora", folder / "backend" / "patcher" / "lora.py")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)

    def load(lora: dict[str, Any], to_load: dict[str, Any]) -> set[str]:
        return set(own.load_lora(lora, to_load)[1])

    found = {}
    for family, models in LISTS.items():
        maps: dict[str, Any] = {}
        for listed, config in models.items():
            model = SimpleNamespace(
                state_dict=lambda listed=listed: denoiser(listed),
                diffusion_model=SimpleNamespace(config=config),
                config=SimpleNamespace(huggingface_repo=REPOSITORY[family]),
            )
            own.model_lora_keys_unet(model, maps)
        texts = text_encoders(family)

        class Encoders:
            def state_dict(self, texts: dict[str, None] = texts) -> dict[str, None]:
                return texts

            def __iter__(self, texts: dict[str, None] = texts) -> Iterator[str]:
                return iter(texts)

        own.get_function("model_lora_keys_clip")(Encoders(), maps)
        found[family] = by_key_map(maps, load)
    return found


def rows_of(family: str) -> dict[str, int]:
    """The rows of each weight of a family's denoiser."""
    if size := family_data(family)["diffusers"].get("lora_size"):
        own = FAMILIES[family]
        return {n: s[0] for n, s in own.published[size]()[own.denoiser].shapes().items()}
    listed = [pair for name in LISTS[family] for pair in names(name).items()]
    return {n.removeprefix("model.diffusion_model."): s[0] for n, s in listed if s}


def diffusers() -> dict[str, Taken]:
    import diffusers as library

    logging.disable(logging.WARNING)
    found = {}
    for family in FAMILY_TITLES:
        own = getattr(library, family_data(family)["diffusers"]["pipeline"])
        spoken = FAMILIES[family].lora_names_in({})
        table, theirs = spellings(spoken), paths_of(spoken)
        samples = {template(name): name for name in reversed(table)}
        rows = rows_of(family)
        taken: Taken = {}
        for style, ends in STYLES.items():
            for pattern, name in samples.items():
                place = table[name]
                if place.component not in own._lora_loadable_modules:
                    continue
                sized = arrays(ends, SIZE if place.path else rows.get(f"{place.module}.weight", SIZE))
                ends_taken = _taken(own, family, sized, name, table, theirs)
                if ends_taken:
                    taken.setdefault(style, {})[pattern] = ends_taken
        found[family] = taken
    logging.disable(logging.NOTSET)  # ComfyUI tells by warnings what it leaves
    return found


def paths_of(spoken: Any) -> set[str]:
    """The module names of diffusers' own networks, a text encoder's with and without its leading part."""
    own = ((c.name, path) for c in spoken.components for paths in c.modules.values() for path in paths)
    return {f"{name}.{spelled}" for name, path in own for spelled in (path, path.removeprefix("text_model."))}


def _taken(own: Any, family: str, sized: dict[str, Any], name: str, table: Any, theirs: set[str]) -> list[str]:
    """The ends of one module's tensors that come through diffusers' conversion under its own names.

    Of a CLIP it tells the naming by the output of an attention, which every file has: one stands beside the module.
    """
    place = table[name]
    outputs = [n for n, other in table.items() if other.component == place.component and other.module.endswith(OUTPUT)]
    beside = max(outputs, key=lambda output: _alike(output, name), default=name)
    lora = {module + end: array for module in (name, beside) for end, array in sized.items()}
    more = {"unet_config": SimpleNamespace(layers_per_block=2)} if family == "sdxl" else {}
    try:
        result = own.lora_state_dict(dict(lora), **more)
    except Exception:  # whatever it says of a LoRA that it does not take
        return []
    made = result[0] if isinstance(result, tuple) else result
    if any("lora" not in key for key in made):  # its loader's own check, of the whole file
        return []
    component, own_module = place.component, place.module
    slots = set()
    for key in _as_peft(made, component):
        module, slot = split_key(key) or ("", "")
        found = table.get(module)
        named = found and found.dialect == "peft" and module in theirs
        if named and found.module == own_module and key.endswith(OWN_ENDS):
            slots.add(slot)
    if not {"down", "up"} <= slots:
        return []
    return sorted(end for end in sized if end == ".alpha" or (split_key(name + end) or ("", ""))[1] in slots)


def _alike(one: str, other: str) -> int:
    """How many letters two names begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _as_peft(made: dict[str, Any], component: str) -> dict[str, Any]:
    """What its loaders of one component hand to PEFT."""
    from diffusers.utils import state_dict_utils as own

    try:
        if component.startswith("text_encoder"):
            return dict(own.convert_state_dict_to_peft(own.convert_state_dict_to_diffusers(dict(made))))
        if not any("lora_A" in key for key in made):
            return dict(own.convert_unet_state_dict_to_peft(dict(made)))
    except (ValueError, KeyError):
        return {}
    return made


def compact(found: dict[str, Taken]) -> dict[str, Any]:
    """Family -> style -> [ends taken, number of a list of modules]; and the lists."""
    lists: list[list[str]] = []
    families: dict[str, Any] = {}
    for family, styles in found.items():
        for style, modules in styles.items():
            groups: dict[tuple[str, ...], list[str]] = {}
            for module, ends in modules.items():
                groups.setdefault(tuple(ends), []).append(module)
            for ends, members in groups.items():
                if sorted(members) not in lists:
                    lists.append(sorted(members))
                families.setdefault(family, {}).setdefault(style, []).append([ends, lists.index(sorted(members))])
    return {"families": families, "modules": lists}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", nargs=2, metavar=("CHECKOUT", "DATE"))
    parser.add_argument("--forge", nargs=2, metavar=("CHECKOUT", "DATE"))
    args = parser.parse_args()
    quoted = re.compile(r"version(?:__)? = [\"'](.+?)[\"']")
    table = json.loads(gzip.decompress(TABLE.read_bytes()))
    table["diffusers"] = {"version": version("diffusers"), "date": date.today().isoformat(), **compact(diffusers())}
    for program, given, read, stated in (
        ("ComfyUI", args.comfyui, comfyui, "comfyui_version.py"),
        ("Forge", args.forge, forge, "modules_forge/forge_version.py"),
    ):
        if given:
            folder, when = Path(given[0]), given[1]
            said = quoted.search((folder / stated).read_text())
            table[program] = {"version": said[1], "date": when, **compact(read(folder))}
    comfyui_read(table["ComfyUI"])
    TABLE.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":"), sort_keys=True).encode(), mtime=0))
    print(f"{TABLE}: {TABLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
