"""How command lines are read: the options that commands share, none of them dropped; ~ is the user's home."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from flame_train.families import FAMILY_TITLES
from flame_train.io.addresses import is_hub_name


def described(function: Callable[..., Any] | None) -> str | None:
    """Tells what a command says of itself: its docstring, from its source where Python keeps none (-OO)."""
    if function is None or function.__doc__:
        return None  # the parser reads it
    try:
        (tree,) = ast.parse(inspect.getsource(function)).body
    except OSError:  # installed without its source
        return None
    return ast.get_docstring(tree) if isinstance(tree, ast.FunctionDef) else None


def device_name(value: str) -> str:
    """Returns a device as given, if it is one. Raises `BadParameter` if not."""
    kind, colon, number = value.partition(":")
    if value == "cpu" or (kind == "cuda" and (number.isdecimal() or not colon)):
        return value
    raise typer.BadParameter(f"{value!r} is not one of 'cuda', 'cuda:N' (GPU number N, from 0), 'cpu'.")


def card_size(text: str) -> float:
    """Gives the GB of a card: 12, 12GB, "12 GB" and 12GiB are the same card. Raises `BadParameter` for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"expected the memory of a GPU in GB, such as 12 or 12GB, got {text!r}.")
    return float(match[1])


def families_from(prefix: str) -> list[str]:
    """Returns the families whose name begins so, for completion."""
    return [family for family in FAMILY_TITLES if family.startswith(prefix)]


def keys_from(prefix: str) -> list[str]:
    """Returns the keys of a config, as `--set` takes them, that begin so, for completion."""
    from flame_train.config.keys import keys

    return [f"{path}=" for path in keys() if path.startswith(prefix)]


def presets_from(prefix: str) -> list[str]:
    """Returns the presets of `init` that begin so, for completion."""
    from flame_train.tools.init import names

    return [name for name in names() if name.startswith(prefix)]


def devices_from(prefix: str) -> list[str]:
    """Returns the devices that begin so, for completion; which GPUs there are is not asked."""
    return [device for device in ("cuda", "cuda:0", "cuda:1", "cpu") if device.startswith(prefix)]


def from_hub(file: Path | None) -> Path | None:
    """Returns a file that is read: what hf:owner/name/file names is fetched, any other path stays."""
    if file is None or not is_hub_name(file.as_posix()):
        return file
    from flame_train.io.hub import fetch_path

    return fetch_path(file)


_SHOWN = "cuda|cuda:N|cpu"
Device = Annotated[
    str,
    typer.Option(
        "--device",
        parser=device_name,
        metavar=_SHOWN,
        autocompletion=devices_from,
        help="Device to compute on. There is no fallback.",
    ),
]
DeviceOrBest = Annotated[
    str | None,
    typer.Option(
        "--device",
        parser=device_name,
        metavar=_SHOWN,
        autocompletion=devices_from,
        help="Default: a GPU if one is usable, else the CPU.",
    ),
]
ConfigPath = Annotated[
    str, typer.Option("--config", "-c", help="TOML or YAML file as `init` writes it; -: standard input.")
]
ConfigFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="TOML or YAML file as `init` writes it; -: standard input.")
]
ConfigOption = Annotated[str | None, typer.Option("--config", "-c", metavar="FILE", help="The same as FILE.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the config; repeatable.",
        autocompletion=keys_from,
    ),
]
Steps = Annotated[str | None, typer.Option("--steps", metavar="N", help="Short for --set train.steps=N.")]
LearningRate = Annotated[str | None, typer.Option("--lr", metavar="LR", help="Short for --set optimizer.lr=LR.")]
LoraRank = Annotated[str | None, typer.Option("--rank", metavar="N", help="Short for --set lora.rank=N.")]
MemoryBudget = Annotated[
    str | None, typer.Option("--memory", metavar="GIB", help="Short for --set memory.budget='GIB GiB', or auto.")
]
ModelsFolder = Annotated[
    str | None, typer.Option("--models", metavar="DIR", help="Short for --set model.search=DIR: ComfyUI's models, say.")
]
RunFolderPath = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Short for --set output.dir=DIR.")
]
Checkpointing = Annotated[
    Literal["off", "full", "offload", "mlp"],
    typer.Option("--checkpointing", help="As gradient.checkpointing in a config."),
]
CheckpointBlocks = Annotated[
    list[str] | None, typer.Option("--checkpoint-blocks", help="As gradient.checkpoint_blocks; repeatable.")
]
Quantize = Annotated[
    Literal["off", "fp8", "int8", "int8-convrot", "nf4"],
    typer.Option("--quantize", help="As model.quantize in a config."),
]
Arithmetic = Annotated[
    Literal["bf16", "fp8", "int8"], typer.Option("--arithmetic", help="As model.arithmetic in a config.")
]
BenchModel = Annotated[
    str, typer.Option("--model", help="A published size, such as sdxl or flux-dev, or a tiny one, such as sdxl-tiny.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic/--not-deterministic", help="As train.deterministic in a config.")
]
Rank = Annotated[int | None, typer.Option("--rank", help="Singular values to keep in each layer.")]
Error = Annotated[
    float | None,
    typer.Option("--error", help="Largest difference of a layer, as a share: 0.1 is 10 %; not with --rank."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the config, images and model headers, print the plan, train nothing.")
]
LoraOutput = Annotated[Path, typer.Option("--output", "-o", help="LoRA file to write.")]
LoraPath = Annotated[Path, typer.Argument(metavar="FILE", callback=from_hub, help="LoRA file to read.")]
Gpus = Annotated[
    int, typer.Option("--gpus", min=1, help="Number of GPUs on this machine; mpirun starts a process for each.")
]
Transport = Annotated[
    Literal["auto", "nccl", "mpi"], typer.Option("--collectives", help="How processes sum gradients.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there already.")]
Prediction = Annotated[
    Literal["epsilon", "v", "flow"] | None, typer.Option("--prediction", help="As model.prediction in a config.")
]
QwenEdit = Annotated[
    Literal["auto", "2509", "2511"], typer.Option("--qwen-edit", help="As model.qwen_edit in a config.")
]
T5Padding = Annotated[
    Literal["seen", "zeros", "masked"], typer.Option("--t5-padding", help="As text_encoders.t5_padding.")
]
Sampler = Annotated[
    str, typer.Option("--sampler", help="As sample.sampler in a config; SD3 and Flux take euler and heun.")
]
Precision = Annotated[
    Literal["fp32", "bf16", "fp16"], typer.Option("--precision", help="As train.precision in a config.")
]
TextPrecision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "nf4"],
    typer.Option("--text-precision", help="As text_encoders.precision in a config."),
]
Spacing = Annotated[
    Literal["auto", "leading", "trailing"],
    typer.Option("--spacing", help="As sample.spacing in a config (SDXL, SD 1.5, 2.1)."),
]
SkipUnknown = Annotated[bool, typer.Option("--skip-unknown", help="Leave out parts of a LoRA that are not read here.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def one_config(file: str | None, option: str | None) -> str:
    """Returns the config that a command was given, as its argument or by `--config`. Raises `BadParameter`."""
    if file is not None and option is not None:
        raise typer.BadParameter(f"expected one config, got {file} and --config {option}")
    source = option if file is None else file
    if source is None:
        raise typer.BadParameter("expected a config: flame-train train FILE; `flame-train init FAMILY` writes one")
    return source


def with_shorthands(overrides: Iterable[str] | None, shorthands: Mapping[str, object]) -> list[str]:
    """Returns the overrides of `--set`, and those of options that are short for a key: {key: value, or None}.

    Raises `BadParameter` where both name a key: nobody knows which was meant.
    """
    settings = list(overrides or [])
    named = {text.partition("=")[0].strip() for text in settings}
    for key, value in shorthands.items():
        if value is not None:
            if key in named:
                raise typer.BadParameter(f"{key} was given twice: by --set, and by the option that is short for it")
            settings.append(f"{key}={value}")
    return settings


def memory_budget(value: str | None) -> str | None:
    """Reads `memory.budget` as `--memory` gives it: a bare number counts GiB."""
    if value is None:
        return None
    return f"{value} GiB" if value.strip().lstrip("+-").replace(".", "", 1).isdigit() else value


class _PlainFlags:
    """Of a command or group: flags, which take no value, show none in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Lists all options and arguments, that of --help among them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # the parser's, whose classes follow this one
        for each in params:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
        return params


class Group(_PlainFlags, TyperGroup):
    """A command with commands of its own."""


class Command(_PlainFlags, TyperCommand):
    """A command that refuses a repeated option of one value, and an empty path.

    The parser would take the last of the values, and the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the values into `ctx.params`. Raises the parser's own errors, which the parser shows."""
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order:
            single = option.param_type_name == "option" and not option.multiple
            repeats_itself = getattr(option, "is_flag", False) and not option.secondary_opts
            if single and not repeats_itself and order.count(option) > 1:
                raise typer.BadParameter(f"{option.opts[0]} takes one value, and was given {order.count(option)}", ctx)
        rest: list[str] = super().parse_args(ctx, args)
        for name, value in ctx.params.items():
            if isinstance(value, Path):
                if values.get(name) == "":
                    raise typer.BadParameter("expected a path, got an empty one", ctx, param_hint=name.upper())
                ctx.params[name] = Path(os.path.expanduser(value))
            elif isinstance(value, list | tuple) and all(isinstance(each, Path) for each in value):
                ctx.params[name] = [Path(os.path.expanduser(each)) for each in value]
        return rest
