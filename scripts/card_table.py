"""Tables of cards: the README's says what fits, that of docs/memory.md also what the budget chose and a step's time.

    python scripts/card_table.py                      prints the table of docs/card_table.json
    python scripts/card_table.py --write              writes it into both pages
    python scripts/card_table.py --predict FOLDER     predicts all rows again, without a GPU, into that file
    python scripts/card_table.py --measure FOLDER     runs them on this machine's GPU, and adds what they took

Each row is a whole command on an empty checkpoint of published size in FOLDER (`random_checkpoint.py`): encode, train,
sample, save, at 1024 x 1024 or the model's own size, batch 1 and rank 16. `--only "flux-dev *"` takes a glob over
"MODEL GIB". `--measure` asks NVML five times a second what the process has of the card, the CUDA context included, and
takes the median of the steps.
A test holds the pages to the file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
FILE = ROOT / "docs" / "card_table.json"
BEGIN, END = "<!-- cards: scripts/card_table.py --write -->", "<!-- end of cards -->"
MODELS: Final = {
    "sdxl": ("SDXL", (8, 6, 4)),
    "sd15": ("SD 1.5 at 512", (6, 4)),
    "sd35-large": ("SD3.5 large", (12, 8)),
    "flux-dev": ("Flux.1 dev", (24, 16, 12, 8)),
    "zimage": ("Z-Image", (24, 16, 12, 8)),
    "klein-4b": ("FLUX.2 klein 4B", (24, 16, 12, 8)),
    "flux2-dev": ("FLUX.2 dev", (80, 48, 24, 16)),
    "krea2": ("Krea 2", (24, 16, 12, 8)),
    "anima": ("Anima", (16, 12, 8)),
    "qwen-image": ("Qwen-Image 2.1", (24, 16, 12, 8)),
    "qwen-image-edit": ("Qwen-Image-Edit, one control image", (24, 16, 12)),
    "flux3-klein": ("FLUX.3 klein", (24, 16, 12, 8)),
    "chroma": ("Chroma", (24, 16, 12, 8)),
    "wan2.2-5b": ("Wan 2.2", (24, 16, 12, 8)),
}
LONG_ALONE: Final = ("qwen-image-edit",)
"""Models of the longer table alone."""
LARGEST: Final = 24
"""GiB of the largest card in the README's table; those above it stand in docs/memory.md alone."""
STEPS: Final = 12
"""Of a measured run; the first half compiles and captures."""

CASES: Final = [(model, gib) for model, (_, sizes) in MODELS.items() for gib in sizes]
_SHORT: Final = {
    "gradient.checkpointing": "checkpointing {}",
    "model.quantize": "base {}",
    "model.offload": "blocks on the host {}",
    "text_encoders.precision": "text {}",
    "model.vae_precision": "VAE {}",
    "model.vae_tile": "VAE tiles {}",
}

HEAD: Final = """\
Whole runs under a memory budget: encode, train, sample, save, at 1024 x 1024, batch 1, rank 16 and short captions.
The figure is the peak in GiB with the CUDA context. **Bold** ones were measured on an H100 or H200, others predicted.
"""
README_HEAD: Final = """\
"fp8" keeps the base in 8 bits. A percentage is the part of its blocks that waits in host memory.
"""
FULL_HEAD: Final = """\
Times are of a step: predicted for an H200, or measured on the card that `docs/card_table.json` names.
"""


def wide_table(rows: list[dict[str, Any]]) -> str:
    """The README's table: a row for each model, a column for each card, and in a cell what a user gives up."""
    sizes = sorted({row["gib"] for row in rows if row["gib"] <= LARGEST}, reverse=True)
    lines = [HEAD + README_HEAD, f"| card, GiB | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    by_case = {(row["model"], row["gib"]): row for row in rows}
    for model, (title, _) in MODELS.items():
        if model in LONG_ALONE:
            continue
        cells = [_in_short(by_case.get((model, gib))) for gib in sizes]
        lines.append(f"| {title} |{''.join(f' {cell} |' if cell else '|' for cell in cells)}")
    return "\n".join(lines) + "\n"


def _in_short(row: dict[str, Any] | None) -> str:
    if row is None or row["peak_gib"] is None:
        return "" if row is None else "no"
    chosen = dict(line.split(" = ") for line in row["chosen"])
    base = [chosen["model.quantize"].strip('"')] if "model.quantize" in chosen else []
    host = [f"{float(chosen['model.offload']):.0%}"] if "model.offload" in chosen else []
    return ", ".join([_peak(row), *base, *host])


def _peak(row: dict[str, Any]) -> str:
    found = row.get("measured")
    return f"**{found['peak_gib']:.1f}**" if found else f"{row['peak_gib']:.1f}"


def long_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/memory.md: a row for each model and card."""
    lines = [HEAD + FULL_HEAD, "| model | card, GiB | peak, GiB | ms a step | chosen |", "|---|---|---|---|---|"]
    for row in rows:
        begin = f"| {MODELS[row['model']][0]} | {row['gib']} |"
        if row["peak_gib"] is None:
            lines.append(f"{begin} no | | at least {row['least_gib']:.1f} GiB are needed |")
            continue
        found = row.get("measured")
        ms = f"**{found['ms']:.0f}**" if found else f"{row['ms']:.0f}"
        chosen = ", ".join(_short(line) for line in row["chosen"]) or "nothing changed"
        lines.append(f"{begin} {_peak(row)} | {ms} | {chosen} |")
    return "\n".join(lines) + "\n"


def _short(line: str) -> str:
    """A line of a config in few words."""
    key, _, value = line.partition(" = ")
    return _SHORT.get(key, f"{key} {{}}").format(value.strip('"'))


PAGES: Final = {ROOT / "README.md": wide_table, ROOT / "docs" / "memory.md": long_table}


def page(path: Path, rows: list[dict[str, Any]]) -> str:
    """A page with its table."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{PAGES[path](rows)}\n{END}{after}"


def prepared(folder: Path, model: str) -> Path:
    """A config for an empty checkpoint of the model and four drawn images."""
    from full_run import config, draw
    from random_checkpoint import parts_of, tensors, write_empty, write_words

    base = folder / model
    if not (base / "base.safetensors").exists():
        base.mkdir(parents=True, exist_ok=True)
        made = tensors(parts_of(model, t5=True), "")
        write_empty(base / "base.safetensors", made)
        write_words(base, made)
    draw(folder / "images", 4)
    text = config(base / "base.safetensors", folder / "images", base / "run", STEPS)
    if model == "qwen-image-edit":
        draw(folder / "before", 4, seed=1)
        text = text.replace("[model]", '[model]\nqwen_edit = "2511"').replace(
            "[data]", f'[data]\ncontrol = "{folder / "before"}"'
        )
        text = text.replace("[sample]", f'[sample]\ncontrol = "{folder / "before" / "00.png"}"')
    file = base / "run.toml"
    file.write_text(text)
    return file


def command(file: Path, gib: int, *more: str) -> list[str]:
    """`train` under the budget."""
    return [sys.executable, "-m", "flame_train", "train", str(file), "--memory", str(gib), *more]


def predicted(folder: Path, model: str, gib: int) -> dict[str, Any]:
    """A row: what a dry run says."""
    file = prepared(folder, model)
    shutil.rmtree(file.parent / "run", ignore_errors=True)
    done = subprocess.run(command(file, gib, "--dry-run", "--json"), capture_output=True, text=True)
    row: dict[str, Any] = {"model": model, "gib": gib, "peak_gib": None, "ms": None, "chosen": [], "least_gib": None}
    if done.returncode == 2 and "the least is " in done.stderr:
        return row | {"least_gib": float(done.stderr.partition("the least is ")[2].split()[0])}
    if done.returncode:
        sys.exit(done.stderr)
    plan = json.loads(done.stdout)
    return row | {
        "peak_gib": round(plan["predicted_memory_gib"] + plan["cuda_context_gib"], 2),
        "ms": plan["predicted_step_ms"],
        "chosen": plan["chosen_for_the_budget"],
    }


def measured(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """What the row's run took on this machine's GPU."""
    import pynvml

    file = prepared(folder, row["model"])
    run = file.parent / "run"
    for old in (run, folder / "images" / ".flame-cache"):
        shutil.rmtree(old, ignore_errors=True)
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # NVML counts all cards
    card = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    before = peak = pynvml.nvmlDeviceGetMemoryInfo(card).used
    begin = time.monotonic()
    with subprocess.Popen(command(file, row["gib"])) as process:
        while process.poll() is None:
            with contextlib.suppress(pynvml.NVMLError):
                peak = max(peak, pynvml.nvmlDeviceGetMemoryInfo(card).used)
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{row['model']} in {row['gib']} GiB ended with {process.returncode}")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    plain = lines[STEPS // 2 : -1]
    return {
        "peak_gib": round((peak - before) / 2**30, 2),
        "tensors_gib": round(lines[-1]["memory"] / 2**30, 2),
        "ms": round(1e3 / statistics.median(line["images_per_s"] for line in plain), 1),
        "whole_s": round(time.monotonic() - begin, 1),
        "card": pynvml.nvmlDeviceGetName(card),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--predict", type=Path, metavar="FOLDER")
    parser.add_argument("--measure", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    found = {(row["model"], row["gib"]): row for row in rows}
    folder = args.predict or args.measure
    for case in [case for case in CASES if folder and fnmatch.fnmatch(f"{case[0]} {case[1]}", args.only)]:
        if args.predict:
            found[case] = predicted(folder.resolve(), *case)
        elif found[case]["peak_gib"] is not None:
            found[case]["measured"] = measured(folder.resolve(), found[case])
        print(json.dumps(found[case]), flush=True)
        kept = [found[known] for known in CASES if known in found]
        FILE.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in kept) + "\n]\n", encoding="utf-8")
    rows = [found[case] for case in CASES if case in found]
    if args.write:
        for path in PAGES:
            path.write_text(page(path, rows), encoding="utf-8")
    elif not folder:
        print(long_table(rows), end="")


if __name__ == "__main__":
    main()
