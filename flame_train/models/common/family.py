"""A model family: how its files are opened, what its settings are, and what `bench` and `quickstart` take of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from flame_train.config.keys import keys
from flame_train.config.render import toml_value
from flame_train.config.schema import Config, ModelSection, TextEncodersSection
from flame_train.engine import nn
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES, training_adapters
from flame_train.io.hub import path_of_setting
from flame_train.io.lora_names import LoraFamily
from flame_train.io.model_search import current_search
from flame_train.io.weights import open_weights
from flame_train.models.common.found_parts import find_part
from flame_train.models.common.model import Model
from flame_train.models.common.small import QuickstartSpec, write_small
from flame_train.models.common.training_adapter import with_adapter
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.part import Part
from flame_train.networks.files.stated import Stated
from flame_train.text_encoders.encoder_keys import ENCODER_KEYS

FRAME_KEYS: Final = ("data.frames", "data.fps", "data.frame_extraction", "sample.frames", "sample.fps")
"""Those that mean something where there is time."""
OF_SOME: Final = ("model.kontext", "model.qwen_edit", "sample.spacing", *FRAME_KEYS)
"""Config keys that mean nothing for a family which does not say otherwise."""

N = TypeVar("N", bound=nn.Module)
Networks = Mapping[str, nn.Module]
"""The networks of a model by component, with their weights declared."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings with which a family is opened.

    Attributes:
        base: the checkpoint, beside which tokenizers are looked for.
        model: the section of the base model.
        text: the section of the text encoders.
        max_tokens: the tokens of a caption that CLIP keeps.
    """

    base: Path
    model: ModelSection
    text: TextEncodersSection
    max_tokens: int


class Family(ABC):
    """One model family. Its folder in `models/` has the networks; its file here has the rest."""

    name: ClassVar[str]
    """Its key in `FAMILY_TITLES`."""
    files: ClassVar[FamilyFiles]
    """Where its networks are found in files. The first component is the denoiser."""
    encoders: ClassVar[Mapping[str, str]]
    """The key under `[text_encoders]` of each of its text encoders -> the component."""
    unsupported: ClassVar[tuple[str, ...]]
    """Config keys without effect on it, in addition to the keys of other text encoders."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Those of `OF_SOME` that mean something for it."""
    published: ClassVar[Mapping[str, Callable[[], Networks]]]
    """Its published architectures, by the name that `bench --model` knows, and small ones of the same structure."""
    bench_targets: ClassVar[str] = "attention"
    """The preset that `bench` adapts."""
    small: ClassVar[str]
    """The one of `published` that `quickstart` writes."""
    lesson: ClassVar[QuickstartSpec]
    """What `quickstart` teaches."""

    def encoders_of(self, denoiser: nn.Module) -> Mapping[str, str]:
        """Returns those of `encoders` that go with this denoiser, its weights declared."""
        return self.encoders

    @abstractmethod
    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Model:
        """Returns the model of these networks, by component. Raises ConfigError for settings that do not fit it."""

    @staticmethod
    @abstractmethod
    def lora_names() -> LoraFamily:
        """Returns how LoRA files name its modules."""

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        """Returns the module names of a LoRA file with these tensors, by the model that they identify."""
        return self.lora_names()

    @property
    def title(self) -> str:
        """Its usual name."""
        return FAMILY_TITLES[self.name]

    @property
    def command(self) -> str:
        """The command that trains it."""
        return f"{self.name}-lora"

    @property
    def denoiser(self) -> str:
        """The component that is adapted."""
        return self.files.components[0].name

    def unsupported_keys(self) -> tuple[str, ...]:
        """Returns all config keys that have no effect on it."""
        others = [entry for entry in ENCODER_KEYS.values() if entry.name not in self.encoders]
        foreign = (key for key in OF_SOME if key not in self.own_keys)
        return (
            *self.unsupported,
            *foreign,
            *(f"text_encoders.{key}" for entry in others for key in entry.model_fields),
        )

    def refuse_unsupported(self, config: Config) -> None:
        """Raises ConfigError for all keys that are set and have no effect, so that no user relies on them."""
        wrong = []
        for path in self.unsupported_keys():
            section, key = path.split(".")
            value = getattr(getattr(config, section), key)
            if value != keys()[path].default:
                wrong.append(f"{path}: it has no effect on {self.title}, got {toml_value(value)}; remove it")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def open(self, opening: Opening) -> Model:
        """Returns the model in the files that the settings name. Only headers are read, of each file once.

        Raises:
            ConfigError: a network is in no file, or a setting does not fit.
            ModelFileError: a file is not this family's, or not whole.
        """
        own = {component: str(getattr(opening.text, key)) for key, component in self.encoders.items()}
        own["vae"] = opening.model.vae
        own = {component: path for component, path in own.items() if path}
        parts = self.files.all_parts(opening.base, self.denoiser, skip=own)
        encoders = self.encoders_of(parts[self.denoiser].network)
        self._refuse_others(opening, encoders)
        named = {"vae": "model.vae", **{c: f"text_encoders.{key}" for key, c in encoders.items()}}
        lacking = {component: key for component, key in named.items() if component not in (*parts, *own)}
        parts |= self._found(opening, lacking)
        parts |= {component: self._alone(path_of_setting(path), component) for component, path in own.items()}
        if opening.model.training_adapter:
            file = path_of_setting(opening.model.training_adapter)
            strength = opening.model.training_adapter_strength
            parts[self.denoiser] = with_adapter(parts[self.denoiser], file, self._lora_names(file), strength)
        return self.assemble(parts, opening)

    def _refuse_others(self, opening: Opening, encoders: Mapping[str, str]) -> None:
        """Raises ConfigError for keys that are set of text encoders that do not go with the denoiser."""
        paths = [
            f"text_encoders.{key}"
            for entry in ENCODER_KEYS.values()
            if entry.name in self.encoders.keys() - encoders.keys()
            for key in entry.model_fields
        ]
        values = {path: getattr(opening.text, path.partition(".")[2]) for path in paths}
        used = " and ".join(f"text_encoders.{key}" for key in encoders)
        wrong = [
            f"{path}: it has no effect on {opening.base.name}, which takes {used}; got {toml_value(value)}; remove it"
            for path, value in values.items()
            if value != keys()[path].default
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))

    def _found(self, opening: Opening, lacking: Mapping[str, str]) -> dict[str, Part]:
        """Returns networks that are in no file that is named, from `model.search`. Raises ConfigError for all others.

        `lacking` has the key that would name the file, by component.
        """
        search, found, problems = current_search(), dict[str, Part](), list[str]()
        for component, key in lacking.items():
            if not search.folders:
                problems.append(
                    f"{key}: {opening.base} holds no such network; name its file, as published beside the checkpoint, "
                    "or the models folder of ComfyUI or Forge with model.search"
                )
                continue
            alone = partial(self._alone, component=component)
            try:
                found[component] = find_part(search, key, component, self.name, alone)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        return found

    def distilled(self, base: Path) -> str:
        """Says why this checkpoint is taken for a distilled one, by its name and folder; empty: it is not."""
        return ""

    def refuse_distilled(self, base: Path, model: ModelSection) -> None:
        """Raises ConfigError for a distilled checkpoint as a base, unless it has a training adapter or is to change.

        The message ends with the lines to add to [model], of the published adapter of each model of the family.
        """
        if model.training_adapter or model.train_distilled or not (reason := self.distilled(base)):
            return
        known = training_adapters(self.name)
        made = "`flame-train adapter MODEL -o adapter.safetensors` makes one"
        lines = [f'training_adapter = "{each["file"]}"  # {each["of"]}, by {each["by"]}' for each in known]
        raise ConfigError(
            f"model.checkpoint: {base.name} {reason}, so it is distilled to few steps, which training on it would "
            "undo; train on the model that it was made from, or with a training adapter, which is left out when the "
            f"LoRA is used: {made if not known else f'published ones are below, and {made}'}. Add below [model]:\n"
            + "\n".join(f"  {line}" for line in lines or ['training_adapter = "adapter.safetensors"'])
        )

    def _lora_names(self, file: Path) -> LoraFamily:
        with open_weights(file) as weights:
            return self.lora_names_in(weights.shapes)

    def _alone(self, path: Path, component: str) -> Part:
        key = {c: key for key, c in self.encoders.items()}.get(component)
        for entry in ENCODER_KEYS.values():
            if entry.name == key:
                return entry.part(path, component, self.files)
        return self.files.parts(path, [component])[component]

    def declared(self, networks: Networks, opening: Opening) -> Model:
        """Returns the model of networks that are in no file: for measurements and predictions."""
        return self.assemble(
            {
                name: Part(name, Path(name), network, partial(deepcopy, network), {}, {})
                for name, network in networks.items()
            },
            opening,
        )

    def write_small_base(self, folder: Path, seed: int) -> None:
        """Writes `base.safetensors` for a quickstart: the small architecture with random weights."""
        self.write_random_base(self.small, folder, seed)

    def write_random_base(self, size: str, folder: Path, seed: int) -> None:
        """Writes `base.safetensors` with random weights: an architecture of `published`."""
        prefixes = {component.name: component.prefixes[0] for component in self.files.components}
        networks = self.published[size]()
        write_small({prefixes[name]: network for name, network in networks.items()}, folder, seed)


NOTHING_NAMED: Final = Opening(Path(), ModelSection(), TextEncodersSection(), 75)
"""For networks that are in no file."""


def published_name(base: Path) -> str:
    """Says what a checkpoint is called, in lower case: its file or folder, or the repository of a hub's snapshot.

    Of a file or folder in a snapshot both count.
    """
    at = next((at for at, part in enumerate(base.parts) if part.startswith("models--")), None)
    if at is None or base.parts[at + 1 : at + 2] != ("snapshots",):
        return base.name.lower()
    return " ".join((base.parts[at], *base.parts[at + 3 :])).lower()


def says_distilled(base: Path) -> str:
    """Says why a checkpoint is taken for a distilled one, if its `model_index.json` says so, else empty."""
    return "says so of itself" if stated_in(base, "model_index.json").values.get("is_distilled") is True else ""


def network_of(part: Part, kind: type[N]) -> N:
    """Returns a part's network, which is of this class; its weights are declared, none loaded."""
    assert isinstance(part.network, kind)
    return part.network


def stated_in(base: Path, file: str) -> Stated:
    """Returns what a JSON file of a diffusers folder states; nothing if there is none."""
    return Stated.read(base / file) if (base / file).is_file() else Stated()
