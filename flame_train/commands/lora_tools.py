"""The commands of `flame-train` that read and write LoRA files. As in cli.py, each imports its modules when it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from flame_train.commands.output import show
from flame_train.commands.parameters import (
    AsJson,
    Debug,
    Error,
    Force,
    LoraOutput,
    LoraPath,
    Rank,
    SkipUnknown,
    from_hub,
)
from flame_train.io.addresses import is_hub_name

lora_app = typer.Typer()


@lora_app.command("inspect", epilog="Example: flame-train inspect lora.safetensors")
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file, or hf:owner/name/FILE.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Describe a safetensors file: family, layout, dtype, rank, modules, metadata."""
    from flame_train.io.hub import fetch_path, fetching, path_of_setting
    from flame_train.tools.inspect import inspect_file, render

    with fetching("headers"):
        report = inspect_file(path_of_setting(file))
    if report.lora is not None and is_hub_name(file.as_posix()):  # whose alphas are no header's
        report = inspect_file(fetch_path(file))
    report = replace(report, path=file)
    show(report.as_dict(), as_json, render(report))


@lora_app.command(epilog="Example: flame-train publish runs/fox --to hf:owner/fox --dry-run")
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    to: Annotated[str, typer.Option("--to", metavar="hf:OWNER/NAME", help="Repository on the Hugging Face hub.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it; else it is private.")] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Of the checkpoint whose LoRA it is; default: the run's LoRA.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the model card, send nothing.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Upload a run's LoRA to the Hugging Face hub, with a model card and its last samples; never images of a dataset.

    After an upload that broke the same command goes on.
    """
    from flame_train.run.finish.publish import as_text
    from flame_train.run.finish.publish import publish as send

    result = send(run, to, public, dry_run, step)
    show(result, as_json, as_text(result))


@lora_app.command("verify", epilog="Example: flame-train verify lora.safetensors")
def verify_command(
    file: LoraPath,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which of a LoRA's tensors ComfyUI, Forge and diffusers take, or which ComfyUI reads a base in int8."""
    from flame_train.tools.verify import as_dict, render, verify

    readers = verify(file)
    show(as_dict(file, readers), as_json, render(file, readers))


@lora_app.command(epilog="Example: flame-train convert lora.safetensors lora.diffusers.safetensors --to diffusers")
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", callback=from_hub, help="LoRA, or base model, to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    to: Annotated[
        Literal["kohya", "diffusers", "comfyui-int8", "comfyui-int8-convrot"],
        typer.Option("--to", help="Naming of a LoRA, or format of a base."),
    ],
    skip_unknown: SkipUnknown = False,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Rename a LoRA's tensors between the two formats in use, or round a base model to int8 as ComfyUI reads it.

    There and back gives the same bits, with one exception: in diffusers' format alpha / rank is multiplied into the
    tensors. So fp32 files whose alpha / rank is no power of two come back to one unit in the last place.
    """
    from flame_train.tools.verify import taken_by

    if to.startswith("comfyui"):
        if skip_unknown:
            raise typer.BadParameter(f"--skip-unknown goes with a LoRA, not with --to {to}")
        from flame_train.tools.int8_files import convert_base, describe_base

        result = convert_base(source, target, to, force).as_dict()
        readers, lines = taken_by(target)
        show(result | {"programs": readers}, as_json, describe_base(result, lines))
        return
    from flame_train.tools.lora_files import convert as rename
    from flame_train.tools.lora_files import describe_conversion

    result = rename(source, target, to, force, skip_unknown).as_dict()
    readers, lines = taken_by(target)
    show(result | {"programs": readers}, as_json, describe_conversion(result, lines))


@lora_app.command(epilog="Example: flame-train merge base.safetensors lora.safetensors merged.safetensors")
def merge(
    base: Annotated[Path | None, typer.Argument(metavar="BASE", callback=from_hub, help="Base checkpoint.")] = None,
    lora: Annotated[Path | None, typer.Argument(metavar="LORA", callback=from_hub, help="LoRA file.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="OUT", help="Checkpoint to write.")] = None,
    strength: Annotated[float | None, typer.Option("--strength", help="How much of LORA; 1 by default.")] = None,
    to: Annotated[
        Literal["checkpoint", "lora"],
        typer.Option("--to", help="lora: LoRAs into one; BASE only for LoHa, LoKr and DoRA."),
    ] = "checkpoint",
    loras: Annotated[
        list[str] | None, typer.Option("--lora", metavar="FILE[:STRENGTH]", help="With --to lora; repeatable.")
    ] = None,
    rank: Rank = None,
    error: Error = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="LoRA to write, with --to lora.")] = None,
    skip_unknown: SkipUnknown = False,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Bake a LoRA into a base checkpoint, or several LoRAs into one."""
    if to == "checkpoint":
        if base is None or lora is None or target is None:
            raise typer.BadParameter("expected BASE LORA OUT, or --to lora with --lora FILE and -o OUT")
        if loras or rank is not None or error is not None or output is not None:
            raise typer.BadParameter("--lora, --rank, --error and --output go with --to lora")
        from flame_train.tools.lora_files import describe_merge
        from flame_train.tools.merge import merge as bake

        result = bake(base, lora, target, 1.0 if strength is None else strength, force, skip_unknown).as_dict()
        show(result, as_json, describe_merge(result))
        return
    if lora is not None or target is not None or strength is not None or output is None:
        raise typer.BadParameter("with --to lora expected [BASE] --lora FILE[:STRENGTH] ... -o OUT")
    from flame_train.tools.lora_files import describe_lora, truncation_of
    from flame_train.tools.merge_loras import WeightedLora, merge_loras

    want = None if rank is None and error is None else truncation_of(rank, error)
    result = merge_loras([WeightedLora.parse(text) for text in loras or []], output, want, base, force, skip_unknown)
    show(result, as_json, describe_lora(result))


@lora_app.command(epilog="Example: flame-train resize lora.safetensors --rank 8 -o small.safetensors")
def resize(
    file: LoraPath,
    output: LoraOutput,
    rank: Rank = None,
    error: Error = None,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Lower a LoRA's rank by SVD; alpha / rank stays."""
    from flame_train.tools.extract import resize as make
    from flame_train.tools.lora_files import describe_lora, truncation_of

    result = make(file, output, truncation_of(rank, error), force)
    show(result, as_json, describe_lora(result))


@lora_app.command(
    epilog="Example: flame-train extract base.safetensors tuned.safetensors --rank 32 -o lora.safetensors"
)
def extract(
    base: Annotated[Path, typer.Argument(metavar="BASE", callback=from_hub, help="The model before.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", callback=from_hub, help="The model after.")],
    output: LoraOutput,
    rank: Rank = None,
    error: Error = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option("--precision", help="As output.precision in a config.")
    ] = "bf16",
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a LoRA of the difference of two models by SVD."""
    from flame_train.tools.extract import extract as make
    from flame_train.tools.lora_files import describe_lora, truncation_of

    result = make(base, tuned, output, truncation_of(rank, error), precision, force)
    show(result, as_json, describe_lora(result))
