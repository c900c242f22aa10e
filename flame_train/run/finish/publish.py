"""`flame-train publish`: uploads a run's LoRA with a model card and its last samples, and nothing of the dataset."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.config.schema import Config
from flame_train.disk.preflight import reading
from flame_train.errors import OutputError, RemoteError
from flame_train.io.commit import is_checkpoint
from flame_train.io.hub_upload import CARD, hub_name, upload
from flame_train.io.run_files import UNNAMED
from flame_train.io.safetensors import SafetensorsFile
from flame_train.networks.files.identify import identify
from flame_train.show.grids import cropped, media_type
from flame_train.show.run_reader import RunReader, RunView

from .model_card import model_card, said

_LOG = logging.getLogger(__name__)
_OF_THE_DATASET: Final = ("ss_tag_frequency", "ss_dataset_dirs", "ss_reg_dataset_dirs")
_SIDE: Final = 1 << 16  # pixels: samples keep their size


def publish(
    folder: Path, to: str, public: bool = False, dry_run: bool = False, step: int | None = None
) -> dict[str, Any]:
    """Uploads what a run made, or with `dry_run` says what would be uploaded, without the network.

    Args:
        folder: the run's.
        to: owner/name on the hub, or hf:owner/name.
        public: whether everybody may see it.
        dry_run: whether nothing is sent.
        step: of a checkpoint, whose LoRA it is; None: the LoRA of the run.

    Raises:
        ConfigError: `to` is no name.
        OutputError: the folder holds no run, or no LoRA.
        RemoteError: it did not come to the hub; nothing of it is there, and nothing here is changed.
    """
    name = hub_name(to)
    view = _read(folder)
    loras, saved = _loras(view, step)
    images = _samples(view, saved)
    with SafetensorsFile(next(iter(loras.values()))) as file:
        family = identify(file.shapes, file.metadata).family
    prompts = [prompt.text for prompt in view.prompts]
    rows = list(zip(prompts if len(prompts) == len(images) else [""] * len(images), images, strict=True))
    card = model_card(view, name.partition("/")[2], family, next(iter(loras)), saved, rows)
    files: dict[str, Path | bytes] = {**dict.fromkeys(loras, b""), CARD: card.encode("utf-8", "replace"), **images}
    result = {"repository": name, "public": public, "files": list(files), "card": card}
    if dry_run:
        return result
    files |= {lora: without_captions(place) for lora, place in loras.items()}
    return result | {"url": upload(name, files, public, f"The LoRA of step {saved}")}


def without_captions(lora: Path) -> bytes:
    """Returns a LoRA's file without the metadata that repeat captions and folders, which sd-scripts has too."""
    with reading(lora):
        raw = lora.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    metadata = header.get("__metadata__", {})
    header["__metadata__"] = {name: value for name, value in metadata.items() if name not in _OF_THE_DATASET}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that tensors stay aligned
    return b"".join([len(text).to_bytes(8, "little"), text, raw[end:]])


def as_text(result: Mapping[str, Any]) -> str:
    """Returns the result of `publish` for a reader: the address, or of a dry run the card and the files."""
    if "url" in result:
        return str(result["url"])
    seen = "seen by everybody" if result["public"] else "private"
    return f"{result['card']}\nTo {result['repository']}, {seen}: {', '.join(result['files'])}. Nothing was sent."


def publish_at_end(config: Config) -> dict[str, Any]:
    """Does what `output.hub` asks for at the end of a run; a failure costs a warning, since the run is whole."""
    to, folder = config.output.hub, Path(config.output.dir)
    if not to:
        return {}
    try:
        result = publish(folder, to, config.output.hub_public)
    except RemoteError as error:
        again = f"flame-train publish {folder} --to hf:{hub_name(to)}" + " --public" * config.output.hub_public
        _LOG.warning("%s: %s", error, again)
        return {"hub": {"repository": hub_name(to), "url": None, "error": str(error), "again": again}}
    return {"hub": {"repository": result["repository"], "url": result["url"]}}


def _read(folder: Path) -> RunView:
    try:
        view = RunReader(folder).read()
    except OSError as error:
        raise OutputError(f"{folder}: expected a run's folder: {error.strerror or error}") from None
    if not view.settings:
        raise OutputError(f"{folder}: expected a run's folder, which has a config.toml; found none in it")
    return view


def _loras(view: RunView, step: int | None) -> tuple[dict[str, Path], int]:
    """Returns the LoRA's files by name, the main one first, and the step they are of."""
    stem, folder = said(view, "output.name") or UNNAMED, view.folder
    if step is None:
        places = [folder / f"{stem}.safetensors", folder / f"{stem}.diffusers.safetensors"]
        found = {place.name: place for place in places if place.is_file()}
        if f"{stem}.safetensors" not in found:
            raise OutputError(
                f"{folder}: expected {stem}.safetensors, which a run writes at its end; finish the run, or say --step "
                f"N for a checkpoint's ({_steps(folder)})"
            )
        return found, view.step
    place = folder / "checkpoints" / f"step-{step:06d}"
    files = sorted(p for p in place.glob("*.safetensors") if p.name != "optimizer.safetensors")
    if not files:
        raise OutputError(f"{place}: there is no checkpoint with a LoRA; there are {_steps(folder)}")
    files.sort(key=lambda file: len(file.name))
    return {file.name: file for file in files}, step


def _steps(folder: Path) -> str:
    kept = sorted(
        p.name.removeprefix("step-").lstrip("0") for p in folder.glob("checkpoints/*") if is_checkpoint(p.name)
    )
    return f"steps {', '.join(kept)}" if kept else "no checkpoints"


def _samples(view: RunView, step: int) -> dict[str, bytes]:
    """Returns the images of the last grid until a step, by their names in the repository."""
    grids = [grid for grid in view.grids if grid.step <= step]
    if not grids:
        return {}
    try:
        raw = RunReader(view.folder).grid(grids[-1])
        parts = cropped(raw, grids[-1].boxes, _SIDE, "PNG")
    except OSError as error:
        _LOG.warning("the samples of step %d are not published: %s", grids[-1].step, error)
        return {}
    return {f"samples/{number}.{media_type(part).partition('/')[2]}": part for number, part in enumerate(parts, 1)}
