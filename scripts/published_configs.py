"""Imports the example configs that other trainers publish, and plans a run of each on a small model.

    python scripts/published_configs.py MIRRORS FOLDER [--only WORD]

MIRRORS has a clone of each trainer, bare or not, by itself or in a folder. Every TOML, YAML, JSON and shell file of
their newest commit is tried, and every block of code in Markdown; of files with one content the first. What `import`
makes of one is changed where a small model needs it, and nowhere else: places of files, the resolution, the sizes of
buckets and of samples. Then `--dry-run` reads it.
FOLDER gets the files, the images, and `outcome.md`: a table of what became of each config for a family that is here.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flame_train.config.foreign.recognize import read_foreign
from flame_train.errors import FlameError
from flame_train.models.registry import FAMILIES
from flame_train.run.commands.stages import train
from flame_train.tools.import_config import import_config

_ENDINGS = (".toml", ".yaml", ".yml", ".json", ".sh")
_BLOCK = re.compile(r"^[ \t]*```(toml|ya?ml|json|bash|sh|shell)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_LARGEST = 200_000  # bytes of a config
_SIDE = 64
_NOT_OURS = ("its keys are of none of them", "expected TOML", "expected JSON", "expected YAML", "expected an object")


def git(repository: Path, *arguments: str) -> bytes:
    """What git says; empty where it fails, as for a blob that a partial clone lacks."""
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True).stdout


def repositories(mirrors: Path) -> list[tuple[str, Path]]:
    """The clones below a folder, each with its name."""
    heads = [path for depth in ("*", "*/*", "*/.git") for path in mirrors.glob(f"{depth}/HEAD")]
    found = {path.parent for path in heads if (path.parent / "objects").is_dir()}
    return sorted((path.relative_to(mirrors).parts[0].split("+")[-1], path) for path in found)


def extract(repository: Path, folder: Path) -> None:
    """Writes the files that may be configs, and the blocks of code in Markdown, each as a file beside it."""
    for line in git(repository, "ls-tree", "-r", "-l", "HEAD").decode(errors="replace").splitlines():
        facts, _, name = line.partition("\t")
        kind, size = facts.split()[1], facts.split()[3]
        if kind != "blob" or not name.endswith((*_ENDINGS, ".md")) or not size.isdigit() or int(size) > _LARGEST:
            continue
        text = git(repository, "show", f"HEAD:{name}").decode(errors="replace")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith(".md"):
            path.write_text(text)
            continue
        for number, (language, block) in enumerate(_BLOCK.findall(text), 1):
            ending = {"toml": "toml", "json": "json"}.get(language, "yaml" if "ya" in language else "sh")
            indent = min((len(x) - len(x.lstrip()) for x in block.splitlines() if x.strip()), default=0)
            plain = "\n".join(x[indent:] for x in block.splitlines())
            Path(f"{path}.{number}.{ending}").write_text(plain + "\n")


def images(folder: Path, seed: int, ending: str) -> str:
    """Twelve images with captions, others for each seed."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        pixels = rng.integers(0, 256, (96, 96 + 16 * (i % 3), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        (folder / f"{i:02}{ending}").write_text(f"a red circle, number {i}")
    return str(folder)


def on_small_model(tree: dict[str, Any], family: str, folder: Path) -> dict[str, Any]:
    """The config with the small model's files, drawn images and their sizes."""
    base = folder / family
    if not base.exists():
        base.mkdir(parents=True)
        FAMILIES[family].write_small_base(base, 3)
    data = tree.setdefault("data", {})
    tree.setdefault("model", {}).update(checkpoint=str(base / "base.safetensors"))
    tree["model"].pop("vae", None)
    for key in ("clip_l", "clip_g", "t5", "t5_vocabulary"):
        tree.get("text_encoders", {}).pop(key, None)
    tree.get("lora", {}).pop("from", None)
    sample = tree.get("sample", {})
    for key in ("width", "height", "prompt_file"):
        sample.pop(key, None)
    sample["prompts"] = [
        {k: v for k, v in p.items() if k not in ("width", "height")} if isinstance(p, dict) else p
        for p in sample.get("prompts", [])
    ]
    tree["sample"] = sample
    tree["output"] = tree.get("output", {}) | {"dir": str(folder / "run")}
    for key in ("min_bucket", "max_bucket", "resolutions", "cache", "mask_folder"):
        data.pop(key, None)
    data.update(resolution=_SIDE, bucket_step=32, on_bad_image="error")
    usual = data.get("caption_extension", ".txt")
    for number, own in enumerate(data.get("sets", [])):
        own.pop("mask_folder", None)
        if "resolutions" in own:
            own["resolutions"] = [_SIDE]
        ending = own.get("caption_extension", usual)
        own["path"] = images(folder / f"set{number}{ending}", number, ending)
    if not data.get("sets"):
        data["path"] = images(folder / f"images{usual}", 99, usual)
    return tree


def family_of(source: Path) -> Iterator[str]:
    """The families to try for a config that names none: those in its path, else SDXL."""
    named = [family for family in FAMILIES if family in str(source).lower()]
    yield from named or ["sdxl"]


def outcome(source: Path, folder: Path) -> tuple[str, str, int, int, str] | str:
    """Program, family, carried and lost keys, and what `--dry-run` says; a word for a file that is no config here."""
    try:
        program, read = read_foreign(str(source))
        if not read.settings and not read.sets:
            return "no config"
        if program.name.startswith("sd-scripts") and not read.sets and "pretrained" not in " ".join(read.settings):
            return "a part of a config"
    except FlameError as error:
        return "no config" if any(word in str(error) for word in _NOT_OURS) else f"refused: {error}".split("\n")[0]
    if read.settings and not read.family and program.name != "sd-scripts":
        return "does not say which model it is for"
    family = read.family or next(family_of(source))
    try:
        made = import_config(str(source), None, family)
        tree = on_small_model(tomllib.loads(made["config"]), family, folder)
        plan = train(tree, [], "cpu", True)
        said = f"passes: {plan['images']} samples, {plan['steps']} steps"
    except FlameError as error:
        made = {"carried": {}, "sets": [], "listed": []} if "made" not in locals() else made
        said = "says: " + str(error).replace("\n", "; ")
    carried = len(made["carried"]) + sum(map(len, made["sets"]))
    return program.name, family if read.settings else "any", carried, len(made["listed"]), said


def _seen_before(source: Path, seen: set[bytes]) -> bool:
    """Whether a file of the same content came before, as in translations; those have longer names."""
    content = source.read_bytes()
    twice = content in seen
    seen.add(content)
    return twice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirrors", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files with this in their path")
    args = parser.parse_args()
    logging.getLogger("flame_train").setLevel(logging.ERROR)  # what a plan notes about the drawn images
    rows, others = [], Counter[str]()
    for name, repository in repositories(args.mirrors):
        own = args.folder / "files" / name
        if not own.exists():
            extract(repository, own)
        seen: set[bytes] = set()
        for source in sorted(own.rglob("*"), key=lambda path: (len(str(path)), path)):
            if not source.is_file() or args.only not in str(source) or _seen_before(source, seen):
                continue
            found = outcome(source, args.folder)
            if isinstance(found, str):
                others[f"{name}: {re.sub(r'^refused: .*?: ', 'refused: ', found)[:100]}"] += 1
                continue
            rows.append((source.relative_to(own), *found))
            print(name, *rows[-1], sep=" | ", flush=True)
    head = ["| program | file | family | carried | lost | dry run |", "|---|---|---|---|---|---|"]
    lines = [f"| {p} | `{file}` | {family} | {kept} | {lost} | {said} |" for file, p, family, kept, lost, said in rows]
    passed = sum(row[-1].startswith("passes") for row in rows)
    lines += ["", f"{len(rows)} configs, of which {passed} pass.", "", *(f"- {n} x {w}" for w, n in others.items())]
    (args.folder / "outcome.md").write_text("\n".join([*head, *lines]) + "\n")
    print(f"{len(rows)} configs for a family that is here, {passed} pass; {args.folder / 'outcome.md'}")


if __name__ == "__main__":
    main()
