"""The files that a config of SimpleTuner names: its data backends and its LyCORIS config."""

from __future__ import annotations

from .table import Reading, Setting, no_file


def unpack_lycoris(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> None:
    """Puts the settings of the LyCORIS config among the others."""
    named = settings.pop("lycoris_config", None)
    if named is None or not named.value:
        return
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("lycoris_config", named, "what it holds is"))
        return
    settings |= {
        f"lycoris.{name}": setting for name, setting in other.flat(other.tree, whole=("apply_preset",)).items()
    }


def sets_of(reading: Reading, settings: dict[str, Setting], notes: list[str], clips: bool) -> list[dict[str, Setting]]:
    """Returns the data backends that are on and hold images, or `clips` where the family has some."""
    named = settings.pop("data_backend_config", None)
    if named is None or not named.value:
        return []
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("data_backend_config", named, "its folders are"))
        return []
    items = other.tree.get("", [])
    sets = list(enumerate(items if isinstance(items, list) else []))
    off = [one.get("disabled") or one.get("disable") for _, one in sets]
    texts = [(one.get("id"), text) for (_, one), text in zip(sets, off, strict=True) if isinstance(text, str)]
    notes += [
        f"{other.file}: set {name}: left out, as SimpleTuner takes the text {text!r} for true" for name, text in texts
    ]
    on = [each for each, text in zip(sets, off, strict=True) if not text]
    folders = {one.get("id"): one.get("instance_data_dir") for _, one in on}
    found = []
    for i, one in on:
        kind = one.get("dataset_type", "image")
        if kind == "video" and not clips:
            notes.append(f"{other.file}: set {one.get('id')}: left out: clips need a model of video")
        if kind not in ("image", "", None, "eval", *(["video"] if clips else [])):
            continue
        own = other.flat(one, ("", f"[{i}]"), whole=("conditioning",))
        shown = own.pop("conditioning_data", None)
        if shown is not None and shown.value:
            names = shown.value if isinstance(shown.value, list) else [shown.value]
            own["control"] = Setting([folders[name] for name in names if folders.get(name)], shown.place)
        if own.pop("dataset_type", Setting("", "")).value == "eval":
            own["validation"] = Setting(True, other.place(("", f"[{i}]")))
        if kind == "video":
            own.setdefault("video.num_frames", Setting(None, other.place(("", f"[{i}]"))))
        elif stray := [name for name in own if name == "video" or name.startswith("video.")]:
            own = {name: setting for name, setting in own.items() if name not in stray}
            notes.append(f"{other.file}: set {one.get('id')}: video: left out, as SimpleTuner reads it of clips alone")
        found.append(own)
    return found
