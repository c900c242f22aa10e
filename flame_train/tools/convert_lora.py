"""`flame-train convert`: a LoRA file from one format to another, both ways."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.adapters import dialects
from flame_train.adapters.dialects import NATIVE
from flame_train.adapters.formats import FORMATS
from flame_train.errors import ConfigError
from flame_train.tools.lora_files import read_source, split_metadata, write_lora

_OF_NATIVE: Final = (dialects.ALPHA_KEY, dialects.RANK_KEY)  # true of the source's tensors only


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The report of a conversion. `modules`: component -> count. `dropped_metadata`: keys too long to keep."""

    source: Path
    target: Path
    to: str
    dialects: tuple[str, ...]
    modules: dict[str, int]
    tensors: int
    dropped_metadata: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return asdict(self) | {"source": str(self.source), "target": str(self.target)}


def convert(source: Path, target: Path, to: str, force: bool = False, skip_unknown: bool = False) -> ConvertReport:
    """Writes the LoRA `source` to `target` in format `to`; returns what was written, for the report.

    Args:
        source: the file, in any dialect.
        to: "kohya" or "diffusers".
        skip_unknown: whether parts of no module are left out.

    Raises:
        ConfigError: an unknown format.
        ModelFileError: a file that is no LoRA of a supported family.
        NonFiniteError: it holds NaN.
        OutputError: the target cannot be written, or exists without `force`.
    """
    source, target = Path(source), Path(target)
    if to not in FORMATS:
        raise ConfigError(f"format {to!r} is not known; expected one of {', '.join(FORMATS)}")
    family, lora = read_source(source, target, force, skip_unknown)
    metadata, dropped = split_metadata(lora.metadata)
    if lora.dialects == (NATIVE,):
        metadata = {key: value for key, value in metadata.items() if key not in _OF_NATIVE}
    tensors = write_lora(target, lora.state, family, to, metadata, same_network=True)
    modules = {component: len(layers) for component, layers in lora.state.items()}
    return ConvertReport(source, target, to, lora.dialects, modules, tensors, dropped)
