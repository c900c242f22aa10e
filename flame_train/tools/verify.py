"""`flame-train verify`: which tensors of a LoRA file ComfyUI, Forge and diffusers take, by their own key maps.

The tables are written by `scripts/lora_readers.py`, which asks these programs; each has a version and a date.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from flame_train.adapters.dialects import spellings, split_key
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.shared_alpha import misread
from flame_train.errors import ModelFileError, shown
from flame_train.families import FAMILY_TITLES
from flame_train.io.lora_names import LoraFamily
from flame_train.io.packed_formats import DENOISER_PREFIXES, INT8, by_comfyui, checked_scales, layers_said
from flame_train.io.safetensors import SafetensorsFile
from flame_train.io.weights import open_weights
from flame_train.models.registry import family_of
from flame_train.tools.lora_files import lora_family, require_lora

TABLE: Final = Path(__file__).with_name("lora_readers.json.gz")
FORGE_REFUSES_ABOVE: Final = 12
"""Forge applies nothing of a file of which it knows more keys not than this (`load_lora_for_models`)."""

_PAIRS: Final = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
)
_MAGNITUDES: Final = (".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".magnitude")
_HADA: Final = (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b")
_LOKR: Final = tuple(
    (*a, *b)
    for a in ((".lokr_w1",), (".lokr_w1_a", ".lokr_w1_b"))
    for b in ((".lokr_w2",), (".lokr_w2_a", ".lokr_w2_b"))
)
_BARE: Final = (*_PAIRS, *((*pair, m) for pair in _PAIRS[:2] for m in _MAGNITUDES), _HADA, *_LOKR)
STYLES: Final = {" ".join(sorted(ends)): ends for bare in _BARE for ends in (bare, (*bare, ".alpha"))}
"""The sets of tensors that a module has in files, by how their names end."""

_SUFFIXES: Final = sorted({end for kind in ADAPTERS.values() for end in kind.files.suffixes}, key=len, reverse=True)
_INT8_SINCE: Final = ("0.27.0 and later", "2026-06-30")
"""The versions that read bases in int8, rotated ones too (Comfy-Org/ComfyUI#14636), and when the first came out."""
_OF_COMFYUI: Final = (INT8, "float8_e4m3fn", "float8_e5m2")
_REFUSED: Final = ("none", "int8_blockwise")
_NUMBER: Final = re.compile(r"(?<=[._])\d+(?=[._]|$)")
_SHOWN: Final = 5
_OTHER_KIND: Final = re.compile(r"\.(hada|lokr)_")
_NEAREST: Final = "flame-train merge BASE --to lora --lora FILE --rank N -o OUT writes the nearest LoRA, and its error"
_BY_ROWS: Final = "{} layers have norms of output rows (DoRA), and are divided by norms of the base weight alone"
_LOST_ALPHAS: Final = (
    "{} attention layers may get the alpha of most layers instead of their own, such as {}; "
    "flame-train convert --to kohya writes a file with one alpha"
)


def template(module: str) -> str:
    """Returns a module's name with `#` for each number that stands by itself: the same for all blocks."""
    return _NUMBER.sub("#", module)


@dataclass(frozen=True, slots=True)
class Reader:
    """What one program takes of a file."""

    program: str
    version: str
    date: str
    taken: int
    left: tuple[str, ...]
    refused: bool
    """Whether it applies nothing at all because of what it does not know."""
    otherwise: tuple[str, ...] = ()
    """What it takes and computes otherwise than this file means it, a sentence each."""
    lacks: str = ""
    """The family or format that its key map here does not know: names were not checked."""
    names: str = ""
    """Of a base: the version in which its names were read, and that one's date."""
    unit: str = "tensors"
    """What `taken` counts."""

    @property
    def verdict(self) -> str:
        """In a word: yes, part, no or not checked."""
        if self.lacks:
            return "not checked"
        if self.refused or not self.taken:
            return "no"
        return "part" if self.left or self.otherwise else "yes"


def verify(path: Path) -> tuple[Reader, ...]:
    """Returns what each program takes of the LoRA at `path`; one whose key map of the model is not known here says so.

    Of a base in ComfyUI's int8 it says which ComfyUI reads it. Raises ModelFileError for another file that is no LoRA,
    or of a model of which no program's key map is known.
    """
    if (base := _of_base(path)) is not None:
        return (base,)
    family = lora_family(path, require_lora(path))
    with open_weights(path) as weights:
        names = weights.names
        rows = sum(n.endswith(".dora_scale") and shape[:1] != (1,) for n, shape in weights.shapes.items())
        alphas = {n: weights.read(n) for n in names if n.endswith(".alpha")}
    by_rows = (_BY_ROWS.format(rows),) if rows else ()
    programs = {"ComfyUI": by_rows, "Forge": by_rows, "diffusers": _lost_alphas(alphas, family)}
    readers = tuple(_read_by(p, names, family, about) for p, about in programs.items())
    if all(reader.lacks for reader in readers):
        raise ModelFileError(f"{path}: no key map of ComfyUI, Forge or diffusers is known for {family.name} LoRAs")
    return readers


def _of_base(path: Path) -> Reader | None:
    """Returns what ComfyUI takes of a base that it or others packed for it; None for another file."""
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return None
    with SafetensorsFile(path) as file:
        said = {layer: settings.get("format", "none") for layer, settings in layers_said(file)}
        if INT8 not in said.values() and "none" not in said.values():
            return None
        for one in by_comfyui(file).values():  # refuses parts that do not belong together
            checked_scales(path, one.names[1], file.read(one.names[1]))
        left = {layer: kind for layer, kind in said.items() if kind in _REFUSED}
        refused = bool(left)
        left |= {layer: "no weight" for layer in said if f"{layer}.weight" not in file.names}
        left |= {layer: "no mark" for layer in _in_int8(file) if layer not in said}
    lacks = ", ".join(sorted(set(said.values()).difference(_OF_COMFYUI, _REFUSED)))
    read = [layer for layer, kind in said.items() if kind in _OF_COMFYUI and layer not in left]
    names = ""
    if not lacks and not left:
        strange, names, lacks = _names_of_base(path, file.names, read)
        left = dict.fromkeys(strange, "no such name")
    taken, leaves = sum(layer not in left for layer in read), tuple(f"{layer} ({why})" for layer, why in left.items())
    lacks = "" if refused else lacks
    return Reader("ComfyUI", *_INT8_SINCE, taken, leaves, refused, lacks=lacks, names=names, unit="layers")


def _in_int8(file: SafetensorsFile) -> Iterator[str]:
    """Yields each layer in int8 with a scale, whether the file says a format of it or not."""
    for name in file.names:
        layer = name.removesuffix(".weight_scale")
        if layer != name and f"{layer}.weight" in file.names and file.info(f"{layer}.weight").dtype == "I8":
            yield layer


def _names_of_base(path: Path, names: Iterable[str], layers: list[str]) -> tuple[list[str], str, str]:
    """Returns which layers have names that ComfyUI does not know, where those were read, or the family without any.

    Of a file's `names` those of the denoiser are looked up.
    """
    try:
        family = family_of(path)
    except ModelFileError:
        return [], "", "this model"
    table = _table()["ComfyUI"]
    if not (styles := table["families"].get(family.name)):
        return [], "", family.title
    taken = frozenset().union(*(table["sets"][number] for style in styles.values() for _, number in style))
    own = {template(f"diffusion_model.{module}") for module in family.lora_names_in({}).components[0].modules}
    prefix = next(p for p in DENOISER_PREFIXES if any(name.startswith(p) for name in names))
    bare = {layer: layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix)}
    strange = [layer for layer, name in bare.items() if template(f"diffusion_model.{name}") not in own & taken]
    about = table["read"].get(family.name, table)
    return strange, f"{about['version']} ({about['date']})", ""


def taken_by(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Gives the same of a file just written, where no table is no error: for `--json`, and lines for a person."""
    try:
        readers = verify(path)
    except ModelFileError as unknown:
        return [], [f"  {unknown}"]
    lines = render(path, readers).splitlines()[1:]
    return as_dict(path, readers)["programs"], [
        line for line in lines if not line.startswith(("    not taken", "    and "))
    ]


def as_dict(path: Path, readers: Iterable[Reader]) -> dict[str, Any]:
    return {"path": str(path), "programs": [asdict(reader) | {"verdict": reader.verdict} for reader in readers]}


def render(path: Path, readers: Iterable[Reader]) -> str:
    """Writes for a person a line for each program, with the first of the keys that it leaves."""
    lines = [str(path)]
    for reader in readers:
        if reader.lacks:
            about = f"{reader.program} {reader.version} ({reader.date})"
            formats = f"; it reads the formats of {reader.taken} layers" if reader.taken else ""
            lines.append(f"  {about}: not checked: its key map here does not know {reader.lacks}{formats}")
            continue
        names = f", by its names in {reader.names}" if reader.names else ""
        lines.append(
            f"  {reader.program} {reader.version} ({reader.date}): {reader.verdict}{names}, "
            f"{reader.taken} {reader.unit} taken, {len(reader.left)} not"
            + ("; it then applies none" if reader.refused else "")
        )
        lines += [f"    computed otherwise: {sentence}" for sentence in reader.otherwise]
        lines += [f"    not taken: {shown(key)}" for key in reader.left[:_SHOWN]]
        if len(reader.left) > _SHOWN:
            lines.append(f"    and {len(reader.left) - _SHOWN} more")
        if reader.verdict == "no" and any(_OTHER_KIND.search(key) for key in reader.left):
            lines.append(f"    {_NEAREST}")
    return "\n".join(lines)


def _lost_alphas(arrays: Mapping[str, Any], family: LoraFamily) -> tuple[str, ...]:
    """Returns what diffusers does to the alphas of a file in kohya's naming: a sentence, if it loses one."""
    known = spellings(family)
    alphas: dict[str, dict[str, float]] = {}
    for name, array in arrays.items():
        place = known.get(name.removesuffix(".alpha"))
        if array.size == 1 and place and place.dialect.startswith("kohya"):
            alphas.setdefault(place.component, {})[place.module] = float(array.reshape(()))
    lost = [name for c in family.components for name in misread(c, alphas.get(c.name, {}))]
    return (_LOST_ALPHAS.format(len(lost), lost[0]),) if lost else ()


def _read_by(program: str, names: Iterable[str], family: LoraFamily, otherwise: tuple[str, ...]) -> Reader:
    table = _table()[program]
    known = spellings(family)
    styles = _styles(program, family)
    if not styles:
        title = FAMILY_TITLES.get(family.name, family.name)
        return Reader(program, table["version"], table["date"], 0, (), False, lacks=title)
    left: list[str] = []
    taken = 0
    for module, keys in _by_module(names).items():
        ends = styles.get(" ".join(sorted(keys)), []) if _belongs(module, known) else []
        ends_read = {end for these, number in ends if template(module) in table["sets"][number] for end in these}
        taken += sum(end in ends_read for end in keys)
        left += [module + end for end in keys if end not in ends_read]
    refused = program == "Forge" and len(left) > FORGE_REFUSES_ABOVE
    about = table.get("read", {}).get(family.name, table)  # a family may be known of a later version
    return Reader(
        program, about["version"], about["date"], taken, tuple(sorted(left)), refused, otherwise if taken else ()
    )


def _styles(program: str, family: LoraFamily) -> dict[str, Any]:
    """Gives what a program takes of a family's files, by the tensors of a module; empty if its key map is not known."""
    families = _table()[program]["families"]
    is_family = family.name in FAMILY_TITLES  # else a model of one of them, such as sd35-medium
    known = family.name if is_family else next((f for f in families if family.name.startswith(f)), "")
    return dict(families.get(known, {}))


def _belongs(module: str, known: Mapping[str, Any]) -> bool:
    """Tells whether the family has the module, which old files spell with `processor`."""
    modern = split_key(f"{module}.lora_down.weight")
    return module in known or (modern is not None and modern[0] in known)


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups by module as spelled how its tensors' names end. A name that ends otherwise is a module of its own."""
    endings: dict[str, list[str]] = {}
    for name in names:
        end = next((end for end in _SUFFIXES if name.endswith(end)), "")
        endings.setdefault(name.removesuffix(end), []).append(end)
    return endings


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(TABLE.read_bytes()))
    for program in content.values():
        program["sets"] = [frozenset(modules) for modules in program["modules"]]
    return content
