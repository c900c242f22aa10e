"""The command line: parses, calls `run`, `tools` or a family, has the result shown, maps errors to exit codes.

Results go to standard output, everything else to standard error. Each command imports its modules when it runs, so
that `--help` answers at once.
"""

from __future__ import annotations

import functools
import io
import logging
import mmap
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flame_train.commands.bench import bench_app
from flame_train.commands.captions import captions_app
from flame_train.commands.lora_tools import lora_app
from flame_train.commands.output import Printable, could_show, open_streams, print_error, print_exception, show, tell
from flame_train.commands.pages import pages_app
from flame_train.commands.parameters import (
    Arithmetic,
    AsJson,
    Command,
    Debug,
    Device,
    DeviceOrBest,
    Force,
    Group,
    Precision,
    Prediction,
    Quantize,
    QwenEdit,
    Sampler,
    SkipUnknown,
    Spacing,
    T5Padding,
    TextPrecision,
    card_size,
    described,
    families_from,
    presets_from,
)
from flame_train.commands.train import sweep_app, train_app
from flame_train.errors import OutputError
from flame_train.families import FAMILY_TITLES
from flame_train.progress import LogLines
from flame_train.version import __version__

app = typer.Typer(
    name="flame-train",
    cls=Group,
    help="LoRA training for diffusion models without PyTorch.",
    epilog="Begin with `flame-train quickstart`, or `flame-train init sdxl --preset character -o my.toml`. "
    "Guides: https://github.com/flame-train/flame-train#readme",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED = 130
_LEAST = 128 << 20  # bytes of address space that libraries take as they load

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILY_TITLES)]


def main() -> None:
    """Is the entry point of the `flame-train` program. Exits with a code of the table in `errors.py`."""
    open_streams()
    ours = logging.getLogger("flame_train")  # not the root: libraries that print their own warnings would do so twice
    handler = LogLines()
    handler.setFormatter(Printable())
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    logging.raiseExceptions = False  # a closed standard error must not stop a run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a caption may not fit the terminal's encoding
    sys.exit(run(sys.argv[1:]))


@functools.cache
def command() -> Callable[..., Any]:
    """The parser of everything below, made once: the annotations of all commands are read for it."""
    for each in (*app.registered_commands, *bench_app.registered_commands):
        each.cls = Command
        each.help = each.help or described(each.callback)
    if bench_app.registered_callback is not None and (text := described(bench_app.registered_callback.callback)):
        bench_app.registered_callback.help = text
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run the program with `arguments`. Returns the exit code; prints one `error:` line for a failure."""
    debug = "--debug" in arguments
    try:
        os.getcwd()
    except FileNotFoundError:
        print_error("the folder that this was started in is gone; change to one that exists and start again")
        return OutputError.exit_code
    try:
        could_show()
        mmap.mmap(-1, _LEAST).close()  # refused here with an error; OpenBLAS, as it loads, would end the process
        code = command()(arguments, prog_name="flame-train", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # the parser's answer to Ctrl-C, which a command that may be stopped has not heard
            return _interrupted(debug)
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, SystemExit):  # the parser's answer to a closed pipe is to exit with 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not print_error
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(debug)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return print_exception(error, debug)


def _interrupted(debug: bool) -> int:
    """Gives the exit code after SIGINT: the user's, or OpenBLAS's own, raised where it is refused a thread."""
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except RuntimeError as error:
        return print_exception(error, debug)
    thread.join()
    tell("interrupted")
    return _INTERRUPTED


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"flame-train {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.registered_commands += [*train_app.registered_commands, *sweep_app.registered_commands]


@app.command(epilog="Example: flame-train quickstart my-first")
def quickstart(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to fill.")] = Path("quickstart"),
    family: Annotated[
        FamilyName, typer.Option("--family", help="Family of the base model; only sdxl's was trained before.")
    ] = "sdxl",
    device: DeviceOrBest = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small LoRA without a checkpoint, a download or a GPU."""
    # Before NumPy loads. Its matrices are so small that BLAS threads wait for each other more than they work. If
    # another process is busy, they wait ten times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from flame_train.quickstart.first_run import run

    show(run(directory, device, family), as_json)


@app.command(epilog="Example: flame-train init sdxl --preset character --card 24 -o my.toml")
def init(
    family: Annotated[
        str,
        typer.Argument(metavar="FAMILY", help=f"One of {', '.join(FAMILY_TITLES)}.", autocompletion=families_from),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", help="What is trained: character, style, concept or edit.", autocompletion=presets_from
        ),
    ] = None,
    card: Annotated[
        float | None,
        typer.Option("--card", metavar="GB", parser=card_size, help="Memory of the GPU, such as 12 or 12GB."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every key, also with --preset or --card.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="TOML file to write.")] = None,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a commented config: short for a preset or a card, else with every key, its default and its unit."""
    from flame_train.tools.init import template, write_template

    if output is None:
        text = template(family, preset, card, full)
        show({"family": family, "config": text}, as_json, text.removesuffix("\n"))
    else:
        write_template(family, output, force, preset, card, full)
        show({"family": family, "output": str(output)}, as_json, str(output))


@app.command("import", epilog="Example: flame-train import kohya.toml --family sdxl -o my.toml")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Config of another trainer: TOML, YAML, JSON or script.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="TOML file to write.")] = None,
    family: Annotated[
        str, typer.Option("--family", help=f"One of {', '.join(FAMILY_TITLES)}, where the file names no model.")
    ] = "",
    partial: Annotated[
        bool, typer.Option("--partial", help="Write it though an optimizer, kind, resolution or length is lost.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Name the settings that need no key here too.")] = False,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a config of another trainer's: sd-scripts, ai-toolkit, OneTrainer, SimpleTuner and others."""
    from flame_train.tools.import_config import as_text, import_config

    result = import_config(file, output, family, force, partial)
    show(result, as_json, as_text(result, verbose))


@app.command(epilog='Example: flame-train sample -m base.safetensors --lora lora.safetensors -p "a cat" -o cat.png')
def sample(
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", "-m", help="Base model: file, folder or hf:owner/name/file.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt, with flags as --n --w --h --d too; repeatable.")
    ] = None,
    prompt_file: Annotated[str, typer.Option("--prompt-file", help="As sample.prompt_file in a config.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write; of a clip WebP or MP4.")] = Path(
        "sample.png"
    ),
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="FILE[:STRENGTH]", help="LoRA file, kohya or diffusers; repeatable."),
    ] = None,
    strength: Annotated[
        float | None, typer.Option("--strength", help="Strength of each LoRA that --lora gives none; 1 by default.")
    ] = None,
    negative: Annotated[str, typer.Option("--negative", help="Negative prompt.")] = "",
    steps: Annotated[int, typer.Option("--steps", min=0, max=1000, help="Sampler steps; 0: the model's own.")] = 0,
    guidance_scale: Annotated[
        float, typer.Option("--guidance-scale", min=0.0, help="Guidance; 0: the model's own.")
    ] = 0.0,
    sampler: Sampler = "euler",
    spacing: Spacing = "auto",
    prediction: Prediction = None,
    precision: Precision = "bf16",
    quantize: Quantize = "off",
    arithmetic: Arithmetic = "bf16",
    vae: Annotated[str, typer.Option("--vae", help="Another VAE, or one for a base model without.")] = "",
    models: Annotated[
        str | None, typer.Option("--models", metavar="DIR", help="As model.search in a config: ComfyUI's models, say.")
    ] = None,
    clip: Annotated[str, typer.Option("--clip", help="CLIP for a base model without (SD 1.5, 2.1).")] = "",
    clip_skip: Annotated[int, typer.Option("--clip-skip", min=1, help="As text_encoders.clip_skip.")] = 1,
    clip_l: Annotated[str, typer.Option("--clip-l", help="CLIP-L for a base model without (SD3, Flux).")] = "",
    clip_g: Annotated[str, typer.Option("--clip-g", help="CLIP-G for a base model without (SD3).")] = "",
    t5: Annotated[str, typer.Option("--t5", help="T5-XXL for a base model without (SD3, Flux).")] = "",
    t5_vocabulary: Annotated[str, typer.Option("--t5-vocabulary", help="Its spiece.model or tokenizer.json.")] = "",
    text_precision: TextPrecision = "auto",
    qwen3: Annotated[str, typer.Option("--qwen3", help="Qwen3 for a base model without one.")] = "",
    qwen3_tokens: Annotated[int, typer.Option("--qwen3-tokens", help="As text_encoders.qwen3_tokens.")] = 512,
    mistral: Annotated[str, typer.Option("--mistral", help="Mistral for a base model without one (FLUX.2 dev).")] = "",
    mistral_tokens: Annotated[int, typer.Option("--mistral-tokens", help="As text_encoders.mistral_tokens.")] = 512,
    t5_tokens: Annotated[int, typer.Option("--t5-tokens", help="As text_encoders.t5_tokens; 0: the family's own.")] = 0,
    t5_padding: T5Padding = "seen",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the first image; each further image has the next number.")
    ] = 42,
    width: Annotated[int, typer.Option("--width", min=0, max=8192, help="Pixels; 0: --control's, or the model's.")] = 0,
    height: Annotated[int, typer.Option("--height", min=0, max=8192, help="Pixels; 0: the same.")] = 0,
    resolution: Annotated[
        int,
        typer.Option("--resolution", min=0, max=8192, help="As data.resolution, for --control too; 0: the model's."),
    ] = 0,
    frames: Annotated[int, typer.Option("--frames", min=1, help="Frames; more than one make a clip (Wan).")] = 1,
    fps: Annotated[int, typer.Option("--fps", min=0, max=120, help="Frames a second; 0: the model's.")] = 0,
    control: Annotated[
        list[str] | None,
        typer.Option("--control", metavar="FILE", help="Image that the model looks at, to edit; repeatable."),
    ] = None,
    kontext: Annotated[bool, typer.Option("--kontext", help="As model.kontext in a config.")] = False,
    qwen_edit: QwenEdit = "auto",
    skip_unknown: SkipUnknown = False,
    force: Force = False,
    device: Device = "cuda",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make images from a base model, with or without a LoRA."""
    from flame_train.tools.lora_files import file_and_strength
    from flame_train.tools.sample import sample as draw

    if not prompt and not prompt_file:
        raise typer.BadParameter("expected at least one --prompt or --prompt-file")
    if "" in (lora or []):
        raise typer.BadParameter("--lora: expected a path, got an empty one")
    if not lora and strength is not None:
        raise typer.BadParameter("--strength says how much of a LoRA; name one with --lora, or leave it out")
    loras = [file_and_strength(text, 1.0 if strength is None else strength) for text in lora or []]
    text_encoders = {
        "clip": clip,
        "clip_skip": clip_skip,
        "clip_l": clip_l,
        "clip_g": clip_g,
        "t5": t5,
        "t5_vocabulary": t5_vocabulary,
        "qwen3": qwen3,
        "qwen3_tokens": qwen3_tokens,
        "mistral": mistral,
        "mistral_tokens": mistral_tokens,
        "t5_tokens": t5_tokens,
        "t5_padding": t5_padding,
        "precision": text_precision,
    }
    result = draw(
        checkpoint,
        prompt or [],
        output,
        loras=loras,
        prompt_file=prompt_file,
        negative=negative,
        steps=steps,
        guidance_scale=guidance_scale,
        sampler=sampler,
        spacing=spacing,
        prediction=prediction,
        precision=precision,
        quantize=quantize,
        arithmetic=arithmetic,
        vae=vae,
        models=[models] if models else [],
        text_encoders=text_encoders,
        seed=seed,
        width=width,
        height=height,
        resolution=resolution,
        frames=frames,
        fps=fps,
        control=control or [],
        kontext=kontext,
        qwen_edit=qwen_edit,
        skip_unknown=skip_unknown,
        device=device,
        force=force,
    )
    drawn = result["drawn"]
    several = len(drawn) > 1  # of one image the settings stand above
    show(result if as_json or several else {n: v for n, v in result.items() if n != "drawn"}, as_json)


_OTHERS = (pages_app, captions_app, lora_app)
app.registered_commands += [each for group in _OTHERS for each in group.registered_commands]


@app.command()
def gradcheck(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Default: every op.")] = None,
    device: Device = "cuda",
    dtype: Annotated[Literal["float64", "float32", "fp64", "fp32"], typer.Option("--dtype")] = "float64",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check the gradient of every differentiable op against finite differences."""
    from flame_train.tools.check_gradients import run

    result = run(ops or [], device, dtype)
    show(result, as_json)
    raise typer.Exit(1 if result["failed"] else 0)


app.add_typer(bench_app, name="bench")


@app.command()
def doctor(device: Device = "cuda", as_json: AsJson = False, debug: Debug = False) -> None:
    """Say what this machine has and lacks for training, and which command installs it."""
    from flame_train.tools.doctor import examine, render

    report = examine(device)
    show(report.as_dict(), as_json, render(report))
    raise typer.Exit(0 if report.usable else 4)
