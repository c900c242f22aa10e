"""Every file that a document cites exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.parent.name != "log"  # the log speaks of the files of its day
)
FOLDERS = (".github", "flame_train", "benchmarks", "tests", "scripts", "docs", "configs")
ENDINGS = ("py", "cu", "cuh", "cpp", "md", "toml", "sh", "json", "jsonl", "txt", "png", "safetensors")
ELSEWHERE = frozenset(
    [
        "my.toml",
        "/runs",
        "zkfox.safetensors",
        "run.py",
        "llama.cpp",
        "resize_lora.py",
        "extract_lora_from_models.py",
        "sdxl_train_network.py",
        "before-after.png",
        "tokenizer.json",
        "cat.png",
        "cat.txt",
        "images.png",
        "bench-step.png",
        "metadata.jsonl",
        "model_index.json",
        "metadata.csv",
        "meta_cap.json",
        "cat.1.txt",
        "cat.2.txt",
        "cat.mask.png",
        "cat-masklabel.png",
        "report.json",
        "images.json",
        "dataset.jpg",
        "controls.png",
        "report.html",
        "loss.png",
        "base.safetensors",
        "lora.safetensors",
        "lora.diffusers.safetensors",
        "merged.safetensors",
        "net.safetensors",
        "config.toml",
        "dataset.json",
        "status.json",
        "log.jsonl",
        "lease.json",
        "samples/",
        "checkpoints/",
        "sd3_train_network.py",
        "utils.py",
        ".process.json",
        "flame-train-queue.toml",
        "request-sample.json",
        "request-save.json",
        "RUN.output.txt",
        "NAME.safetensors",
        "NAME.best.safetensors",
        "lora.best.safetensors",
        "NAME-000500.safetensors",
        "op_errors.jsonl",
        "checkpoint-500.safetensors",
        "checkpoint-STEP.safetensors",
        "flux_lora.safetensors",
        "train.yaml",
        "tokenizer.json",
    ]
)
"""Files of a user or of another project, a name that the design refuses, and a name with a part to fill in."""


def cited(text: str) -> Iterator[str]:
    """Names of files and folders in code, and the targets of links."""
    code = re.findall(r"```.*?```", text, re.DOTALL)
    code += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for word in re.findall(r"(?<![\w/.$~<{*-])[\w./-]*\w/?(?![\w/*<{(]|\.\w)", re.sub(r"\bhf:\S+", "", " ".join(code))):
        top, _, rest = word.partition("/")
        if word.startswith((".venv/", "flame_train.", "//")):  # made by a user; a module's dotted name; an address
            continue
        if Path(word).suffix[1:] in ENDINGS or (rest and (ROOT / top).is_dir()) or (word.endswith("/") and top):
            yield word
    yield from (link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link)


@pytest.fixture(scope="module")
def paths() -> frozenset[str]:
    """Every file and folder of the repository, from its root."""
    found = [path for folder in FOLDERS for path in [ROOT / folder, *(ROOT / folder).rglob("*")]]
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*ROOT.iterdir(), *found])


def exists(name: str, document: Path, paths: frozenset[str]) -> bool:
    """Whether the name is the end of a path: `io/commit.py` is `flame_train/io/commit.py`."""
    end = name.rstrip("/")
    if end.startswith("../"):
        end = (document.parent / end).resolve().relative_to(ROOT).as_posix()
    return any(path == end or path.endswith("/" + end) for path in paths)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_cited_files_exist(document: Path, paths: frozenset[str]) -> None:
    names = set(cited(document.read_text(encoding="utf-8"))) - ELSEWHERE
    assert [name for name in sorted(names) if not exists(name, document, paths)] == []


def test_a_missing_file_is_found(paths: frozenset[str]) -> None:
    text = "`io/commit.py`, `io/gone.py`, `tests/gone/`, [a page](docs/gone.md#end), `tests/data`, `x.item`, `a / b`"
    names = [name for name in cited(text) if not exists(name, ROOT / "README.md", paths)]
    assert names == ["io/gone.py", "tests/gone/", "docs/gone.md"]


TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_cited_tests_exist(document: Path) -> None:
    for file, name in TESTS.findall(document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"
