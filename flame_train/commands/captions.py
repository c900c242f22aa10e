"""The command of `flame-train` that writes captions. As in cli.py, it imports its modules when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flame_train.commands.output import show
from flame_train.commands.parameters import AsJson, Debug

captions_app = typer.Typer()

_OF_SERVER = ("model", "key_variable", "ask", "question", "trigger", "side", "max_tokens")
_OF_TAGGER = ("threshold", "character_threshold")


@captions_app.command(
    epilog="Example: flame-train caption images/fox --server http://localhost:11434/v1 --model qwen3-vl"
)
def caption(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of images, as data.path in a config.")],
    server: Annotated[
        str, typer.Option("--server", metavar="URL", help="Server that speaks OpenAI's chat with images.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Its model; needless if it has one only.")] = "",
    key_variable: Annotated[
        str, typer.Option("--key-variable", metavar="NAME", help="Environment variable that holds the server's key.")
    ] = "",
    ask: Annotated[
        Literal["tags", "sentences", "scene"],
        typer.Option("--ask", help="What is asked; scene: all but how the subject looks, which --trigger names."),
    ] = "sentences",
    question: Annotated[
        str,
        typer.Option(
            "--question", metavar="TEXT", help="Another question; --trigger stands where it says trigger in [ ]."
        ),
    ] = "",
    trigger: Annotated[str, typer.Option("--trigger", metavar="WORD", help="What the subject is called.")] = "",
    side: Annotated[int, typer.Option("--side", min=64, max=4096, help="Longest side of the image sent.")] = 1024,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer at most.")] = 512,
    tagger: Annotated[
        Path | None,
        typer.Option("--tagger", metavar="DIR", help="In place of a server: model.onnx and selected_tags.csv (WD14)."),
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", min=0, max=1, help="Least probability of a tag.")] = 0.35,
    character_threshold: Annotated[
        float | None, typer.Option("--character-threshold", min=0, max=1, help="The same for names of characters.")
    ] = None,
    extension: Annotated[
        str, typer.Option("--extension", help="Ending of caption files, as data.caption_extension.")
    ] = ".txt",
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, max=64, help="Images at once: 4 of a server, 1 of a tagger.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write captions anew that are there.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write captions for a folder's images, by a local server or a tagger; what is there is kept."""
    if bool(server) == (tagger is not None):
        raise typer.BadParameter("expected --server URL or --tagger DIR, and one of them")
    wrong = [name for name in (_OF_TAGGER if server else _OF_SERVER) if _given(context, name)]
    if wrong:
        option, other = wrong[0].replace("_", "-"), "--tagger" if server else "--server"
        raise typer.BadParameter(f"--{option} goes with {other}")
    from flame_train.tools.captions import caption_folder as captions

    captioner: Any
    if tagger is not None:
        from flame_train.tools.captions.tagger import Tagger, Thresholds

        of_characters = threshold if character_threshold is None else character_threshold
        captioner = Tagger(tagger, Thresholds(threshold, of_characters))
    else:
        from flame_train.tools.captions.chat import ChatServer, Question

        asked = Question(captions.question(ask, question, trigger), side, max_tokens)
        captioner = ChatServer(server, model, asked, _key(key_variable))
    summary = captions.caption_folder(
        folder, captioner, extension=extension, overwrite=overwrite, jobs=jobs or (4 if server else 1)
    )
    show(summary.as_dict(), as_json)
    raise typer.Exit(summary.status)


def _given(context: typer.Context, name: str) -> bool:
    """Tells whether the command line has an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _key(variable: str) -> str:
    """Returns the key in an environment variable; empty if none is named. Raises `BadParameter` where it has none."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key.isascii() and key.isprintable() and key):
        raise typer.BadParameter(f"--key-variable: expected a key in the variable {variable}, which has none")
    return key
