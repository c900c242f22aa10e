"""The commands of `flame-train` that take a config: training and its parts. As in cli.py, each imports when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from flame_train.commands.output import show, without_files
from flame_train.commands.parameters import (
    AsJson,
    ConfigFile,
    ConfigOption,
    ConfigPath,
    Debug,
    Device,
    DryRun,
    Force,
    Gpus,
    LearningRate,
    LoraOutput,
    LoraRank,
    MemoryBudget,
    ModelsFolder,
    Overrides,
    RunFolderPath,
    Steps,
    Transport,
    device_name,
    memory_budget,
    one_config,
    with_shorthands,
)
from flame_train.families import FAMILY_TITLES

train_app = typer.Typer()


def _training(family: str | None) -> Callable[..., None]:
    """Returns the command that trains, for any family or for one."""

    def command(
        file: ConfigFile = None,
        config: ConfigOption = None,
        device: Device = "cuda",
        overrides: Overrides = None,
        steps: Steps = None,
        lr: LearningRate = None,
        rank: LoraRank = None,
        output: RunFolderPath = None,
        memory: MemoryBudget = None,
        models: ModelsFolder = None,
        continue_from: Annotated[
            Path | None,
            typer.Option("--continue-from", metavar="RUN", help="As train.continue_from in a config."),
        ] = None,
        dry_run: DryRun = False,
        gpus: Gpus = 1,
        collectives: Transport = "auto",
        remote_wait: Annotated[
            float | None,
            typer.Option(
                "--remote-wait",
                min=0,
                metavar="SECONDS",
                help="How long to wait at the end for the upload to output.remote.",
            ),
        ] = None,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        source = one_config(file, config)
        keys = {
            "train.steps": steps,
            "optimizer.lr": lr,
            "lora.rank": rank,
            "output.dir": output,
            "train.continue_from": continue_from,
            "memory.budget": memory_budget(memory),
            "model.search": models,
        }
        changed = with_shorthands(overrides, keys)
        if gpus > 1 and not dry_run:
            from flame_train.distributed.launch import start_command

            raise typer.Exit(start_command(gpus))
        from flame_train.run.commands.stages import train

        result = train(
            source,
            changed,
            device,
            dry_run,
            family,
            transport=collectives,
            processes=gpus,
            remote_wait=remote_wait,
        )
        if not result:  # only the leading one of several processes has one
            return
        if dry_run:
            from flame_train.run.commands.describe import as_text

            show(result, as_json, as_text(result))
        else:
            from flame_train.run.finish.finish import for_reader

            show(result if as_json else for_reader(result), as_json)

    return command


_ONE_FAMILY = "Training of one family alone"
_HELP = "Train a LoRA for whichever family the checkpoint is of; run it again to continue a stopped run."
train_app.command("train", help=_HELP, epilog="Example: flame-train train my.toml --dry-run")(_training(None))
for _family, _title in FAMILY_TITLES.items():
    _help = f"Train a LoRA for {_title}; refuse a checkpoint of another family."
    train_app.command(f"{_family}-lora", help=_help, rich_help_panel=_ONE_FAMILY)(_training(_family))


@train_app.command()
def reproduce(
    file: Annotated[Path, typer.Argument(metavar="LORA", help="LoRA file that flame-train wrote.")],
    config: ConfigPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder in which the run's own is made anew.")
    ] = Path("reproduced"),
    device: Device = "cuda",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say how a config differs from that of a LoRA file, and train the same bytes again."""
    from flame_train.run.commands.reproduce import reproduce as again

    show(again(file, config, overrides or [], output, device, dry_run), as_json)


@train_app.command(epilog="Example: flame-train ask runs/fox sample")
def ask(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that goes on.")],
    what: Annotated[
        Literal["sample", "save", "stop"],
        typer.Argument(metavar="sample|save|stop", help="A sample grid, a checkpoint, or to stop as Ctrl-C does."),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ask a run for samples or a checkpoint after its present step, or to stop; the result stays the same."""
    from flame_train.disk.open_folder import OpenFolder
    from flame_train.disk.preflight import disk_errors
    from flame_train.io.requests import ask as asked

    with disk_errors(run):
        folder = OpenFolder.open(run)
    with folder:
        show({"run": str(run), "asked": what, "request": str(asked(folder, what))}, as_json)


@train_app.command(epilog="Example: flame-train cache my.toml")
def cache(
    file: ConfigFile = None,
    config: ConfigOption = None,
    prune: Annotated[
        Path | None,
        typer.Option("--prune", help="Instead remove what neither this config nor any in this folder uses."),
    ] = None,
    device: Device = "cuda",
    overrides: Overrides = None,
    memory: MemoryBudget = None,
    models: ModelsFolder = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Encode the images and captions of a config ahead of training."""
    source = one_config(file, config)
    changed = with_shorthands(overrides, {"memory.budget": memory_budget(memory), "model.search": models})
    if prune is not None:
        from flame_train.run.commands.prune import prune_cache

        show(prune_cache(source, changed, prune, dry_run), as_json)
        return
    from flame_train.run.commands.stages import fill_cache

    show(fill_cache(source, changed, device, dry_run), as_json)


@train_app.command(epilog="Example: flame-train dataset my.toml -o report")
def dataset(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="TOML or YAML file of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("dataset-report"),
    overrides: Overrides = None,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Report on a config's images: buckets with contact sheets, duplicates, tiny and blurred ones."""
    from flame_train.run.commands.dataset_report import report

    result = report(config, overrides or [], output, force)
    show(result if as_json else without_files(result), as_json)


@train_app.command("adapter", epilog="Example: flame-train adapter z_image_turbo.safetensors -o adapter.safetensors")
def adapter_command(
    checkpoint: Annotated[str, typer.Argument(metavar="MODEL", help="The distilled model, as model.checkpoint.")],
    output: LoraOutput,
    captions: Annotated[
        Path | None, typer.Option("--captions", metavar="FILE", help="A caption a line; default: a list of its own.")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=2, help="Images that the model draws.")] = 2000,
    resolution: Annotated[int, typer.Option("--resolution", min=64, help="Side of the square of their area.")] = 1024,
    real: Annotated[
        list[Path] | None, typer.Option("--real", metavar="DIR", help="Real images to mix in; repeatable.")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the adapter.")] = 64,
    lr: Annotated[float, typer.Option("--lr", min=0, help="Learning rate.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training at most.")] = 3000,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between measurements of held-out images.")] = 250,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of a step.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of images and training.")] = 42,
    device: Device = "cuda",
    overrides: Overrides = None,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a training adapter for a distilled model, of images that the model draws itself.

    Run it again to continue. The adapter is a LoRA that is added while others are trained, and left out afterwards.
    """
    from flame_train.tools.make_adapter import AdapterOrder, make_adapter

    order = AdapterOrder(
        checkpoint,
        output,
        captions,
        images,
        resolution,
        tuple(real or ()),
        rank,
        lr,
        steps,
        batch,
        seed,
        every,
        tuple(overrides or ()),
    )
    show(make_adapter(order, device, dry_run, force), as_json)


sweep_app = typer.Typer()


@sweep_app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with config, folder, and grid or runs.")],
    where: Annotated[
        Literal["here", "slurm", "ray"], typer.Option("--where", help="slurm: write an array's script and stop.")
    ] = "here",
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            parser=device_name,
            metavar="cuda|cuda:N|cpu",
            help="One run at a time on each; repeatable. Here, default: every GPU.",
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Only show the table of runs.")] = False,
    only: Annotated[int | None, typer.Option("--only", help="Train one run in this process, by its number.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train the runs of a sweep that are not done yet, and show all of them."""
    if only is not None:
        from flame_train.run.commands.stages import train
        from flame_train.sweep.many_runs import one_of

        config, overrides = one_of(file, only)
        show(train(config, overrides, (device or ["cuda"])[0], False), as_json)
        return
    from flame_train.sweep.many_runs import sweep

    devices = device or (["cuda"] if where != "here" or status else _every_gpu())
    result, code = sweep(file, where, devices, status)
    show(result, as_json)
    sys.stdout.flush()
    _end_with(code)


def _end_with(code: int) -> None:
    raise typer.Exit(code)


def _every_gpu() -> list[str]:
    """Returns every GPU of this machine; without one the error of a device that is not there."""
    from flame_train.engine.backend.cuda import gpu_count

    return [f"cuda:{number}" for number in range(gpu_count())] or ["cuda"]
