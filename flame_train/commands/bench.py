"""The commands of `flame-train bench`. As in cli.py, each imports its modules when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flame_train.commands.output import show
from flame_train.commands.parameters import (
    Arithmetic,
    AsJson,
    BenchModel,
    CheckpointBlocks,
    Checkpointing,
    Debug,
    Deterministic,
    Device,
    Gpus,
    Group,
    Overrides,
    Quantize,
    Transport,
)

bench_app = typer.Typer(cls=Group)


@bench_app.callback(invoke_without_command=True)
def bench(context: typer.Context, device: Device = "cuda", as_json: AsJson = False, debug: Debug = False) -> None:
    """Measure this machine; alone a small step: of SDXL at 512 pixels, on the CPU of a tiny SDXL at 64 in fp32."""
    if context.invoked_subcommand is None and device == "cpu":
        bench_step("sdxl-tiny", 64, precision="fp32", device=device, as_json=as_json)
    elif context.invoked_subcommand is None:
        bench_step("sdxl", 512, device=device, as_json=as_json)


@bench_app.command("step")
def bench_step(
    model: BenchModel = "sdxl",
    resolution: Annotated[int, typer.Option("--resolution", min=64, help="Pixels.")] = 1024,
    batch: Annotated[int | None, typer.Option("--batch", min=1, show_default="1", help="Images a step.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=1)] = 16,
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--precision")] = "bf16",
    checkpointing: Checkpointing = "off",
    checkpoint_blocks: CheckpointBlocks = None,
    deterministic: Deterministic = True,
    quantize: Quantize = "off",
    arithmetic: Arithmetic = "bf16",
    against: Annotated[
        Literal["torch", "torch-compiled"] | None,
        typer.Option("--against", help="Also time PyTorch + diffusers + PEFT, if installed; in a checkout."),
    ] = None,
    sweep: Annotated[
        Literal["batch"] | None, typer.Option("--sweep", help="Double the batch from 1 until memory runs out.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", show_default="bench-step.png", help="Write the sweep's plot to this PNG.")
    ] = None,
    overrides: Overrides = None,
    height: Annotated[int | None, typer.Option("--height", min=64, help="Of images that are no squares.")] = None,
    device: Device = "cuda",
    gpus: Gpus = 1,
    collectives: Transport = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The time, the peak memory and the share of this machine's own best of a training step with random weights."""
    if gpus > 1:
        from flame_train.distributed.launch import start_command

        raise typer.Exit(start_command(gpus))
    from flame_train.distributed.join import join
    from flame_train.distributed.watch import ending_together
    from flame_train.tools.bench import BenchCase, step
    from flame_train.tools.bench.batch_sweep import run as run_sweep
    from flame_train.tools.bench.process_times import measure

    group, device = join(device, collectives)
    if sweep and group.world > 1:
        raise typer.BadParameter("a sweep measures one process; leave --sweep out, or start one")
    if sweep and against:
        raise typer.BadParameter("a sweep measures this program alone; leave one of --sweep and --against out")
    if sweep and batch is not None:
        raise typer.BadParameter("a sweep doubles the batch from 1; leave one of --sweep and --batch out")
    if plot is not None and not sweep:
        raise typer.BadParameter("--plot is the image of a sweep; add --sweep batch, or leave it out")
    size = batch or 1
    case = BenchCase(
        model,
        resolution,
        size,
        rank,
        precision,
        checkpointing,
        device,
        deterministic,
        quantize,
        arithmetic,
        checkpoint_blocks or (),
        settings=overrides or (),
        height=height,
    )
    if sweep:
        found, failed = run_sweep(case, plot or Path("bench-step.png"))
        show(found, as_json)
        if failed is not None:
            raise failed
    elif group.world == 1:
        show(step(case, against, by_kind=True), as_json)
    else:
        with ending_together(group):
            found = measure(case, group, against)
        if group.leads:
            show(found, as_json)


@bench_app.command("memory")
def bench_memory(
    model: BenchModel = "sdxl",
    resolution: Annotated[int, typer.Option("--resolution", min=64, help="Pixels.")] = 1024,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images a step.")] = 1,
    rank: Annotated[int, typer.Option("--rank", min=1)] = 16,
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--precision")] = "bf16",
    checkpointing: Checkpointing = "off",
    checkpoint_blocks: CheckpointBlocks = None,
    quantize: Quantize = "off",
    arithmetic: Arithmetic = "bf16",
    device: Device = "cuda",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the memory of a training step, by kind and by op."""
    from flame_train.tools.bench import BenchCase
    from flame_train.tools.bench import step_memory as tool

    result = tool.run(
        BenchCase(
            model,
            resolution,
            batch,
            rank,
            precision,
            checkpointing,
            device,
            quantize=quantize,
            arithmetic=arithmetic,
            checkpoint_blocks=checkpoint_blocks or (),
        )
    )
    show(result, as_json, tool.table(result))


@bench_app.command("ops")
def bench_ops(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Default: the ops of an SDXL step.")] = None,
    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16"],
        typer.Option("--precision", help="tf32: of products and convolutions in fp32, PyTorch's too."),
    ] = "bf16",
    against: Annotated[
        Literal["torch"] | None, typer.Option("--against", help="Also time PyTorch, if installed.")
    ] = None,
    deterministic: Deterministic = True,
    device: Device = "cuda",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time each op at the sizes that matter, in a checkout: rate, share of this machine's ceilings, implementation."""
    from flame_train.tools.bench import from_checkout

    tool = from_checkout("ops", "bench ops")
    result = tool.run(ops or [], device, precision, against, deterministic)
    show(result, as_json, tool.table(result))
