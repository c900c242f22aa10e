"""What a person reads of a report by `resize`, `extract`, `convert` and `merge`: sizes, ranks, and what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.errors import counted

_MUCH: Final = 0.1  # of the update: more is seen in images


def made(report: Mapping[str, Any]) -> str:
    """A LoRA that `resize`, `extract` or `merge --to lora` made, and how far it is from what it was made of."""
    lines = [f"{report['target']}: {size_of(Path(report['target']))}, {_ranks(report['ranks'])}"]
    if source := report.get("source"):
        lines.append(f"before: {source}: {size_of(Path(source))}, {_ranks(report['ranks_before'])}")
    lines += [f"  {lora['lora']}, strength {lora['strength']:g}" for lora in report.get("loras", ())]
    if report["error"]:
        worst = f"worst layer {share(report['largest_error'])}, {report['largest_error_in']}"
        lines.append(f"difference from the original: {share(report['error'])} ({worst})")
        if report["error"] > _MUCH:
            lines.append("that is much: compare images before you delete the original, or keep a higher --rank")
    else:
        lines.append("difference from the original: none but the rounding of the file's numbers")
    if beside := report.get("differences_left_out"):
        lines.append(f"left out: {counted(beside, 'tensor')} that no LoRA can hold")
    return "\n".join([*lines, *_dropped(report.get("dropped_metadata", ()))])


def converted(report: Mapping[str, Any], readers: Iterable[str]) -> str:
    """A file that `convert` wrote, and which programs take it."""
    modules = ", ".join(f"{count} in {component}" for component, count in report["modules"].items())
    lines = [
        f"{report['target']}: {size_of(Path(report['target']))}, with names of {report['to']}",
        f"before: {report['source']}, with names of {', '.join(report['dialects'])}",
        f"  {counted(report['tensors'], 'tensor')}; layers: {modules}",
        *readers,
    ]
    return "\n".join([*lines, *_dropped(report["dropped_metadata"])])


def baked(report: Mapping[str, Any]) -> str:
    """A checkpoint that `merge` wrote."""
    layers = ", ".join(f"{count} in {component}" for component, count in report["modules"].items())
    lines = [
        f"{report['out']}: {size_of(Path(report['out']))}: {report['base']} with {report['lora']} at strength "
        f"{report['strength']:g}",
        f"  {counted(report['changed_tensors'], 'tensor')} changed; layers: {layers}",
    ]
    for component, count in report["skipped"].items():
        lines.append(f"  passed over: {counted(count, 'layer')} of {component}, which is not in {report['base']}")
    return "\n".join([*lines, *_dropped(report["dropped_metadata"])])


def share(part: float) -> str:
    """A share as per cent, with three digits: 20.6 %."""
    return f"{100 * part:.3g} %"


def size_of(path: Path) -> str:
    """The size of a file."""
    size = path.stat().st_size
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (0, "")) if size >= u)
    return f"{size / unit:.1f} {name}" if unit else counted(size, "byte")


def _ranks(ranks: Mapping[int, int]) -> str:
    if len(ranks) == 1:
        return f"rank {next(iter(ranks))}"
    return f"ranks {min(ranks)} to {max(ranks)}"


def _dropped(names: Iterable[str]) -> list[str]:
    return [f"left out of the metadata, which would be too long: {', '.join(names)}"] if names else []
