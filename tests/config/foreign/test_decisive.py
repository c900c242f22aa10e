"""What decides a run and cannot be carried over stops the import of any program's config, without `--partial`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame_train import cli
from flame_train.config.load import load
from flame_train.errors import ConfigError
from flame_train.tools.import_config import as_text, import_config

from . import in_their_style as styles

LOST = {
    "an optimizer of sd-scripts": ("a.toml", styles.SD_FLAT, '"Prodigy"', '"SGDNesterov8bitX"', "optimizer_type"),
    "a kind of sd-scripts": ("a.toml", styles.SD_FLAT, '"networks.lora"', '"networks.dylora"', "network_module"),
    "a resolution of sd-scripts": ("a.toml", styles.SD_FLAT, '"1024,1024"', '"big"', "resolution"),
    "an optimizer of ai-toolkit": ("a.yaml", styles.AI_TOOLKIT, '"adamw8bit"', '"grokfast"', "train.optimizer"),
    "an optimizer of OneTrainer": ("a.json", styles.ONETRAINER_CONFIG, '"PRODIGY"', '"TIGER"', "optimizer"),
    "an optimizer of SimpleTuner": ("a.json", styles.SIMPLETUNER, '"adamw_bf16"', '"soap"', "optimizer"),
    "an optimizer of diffusion-pipe": ("a.toml", styles.DIFFUSION_PIPE, "'adamw_optimi'", "'sophia'", "optimizer.type"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_loss_that_decides_stops_it_and_comes_first(tmp_path: Path, what: str) -> None:
    name, text, was, now, setting = LOST[what]
    assert was in text
    source, out = tmp_path / name, tmp_path / "ours.toml"
    source.write_text(text.replace(was, now))
    family = "sdxl" if text is styles.SD_FLAT else ""
    with pytest.raises(ConfigError) as caught:
        import_config(str(source), out, family)
    first = str(caught.value).splitlines()[1]
    assert first.startswith(f"  {source}:")
    assert f" {setting} = " in first
    assert not out.exists()
    result = import_config(str(source), out, family, partial=True)
    assert f"  {result['listed'][0]}" == first
    assert as_text(result).splitlines()[3] == first


def test_the_command_says_so_and_ends_with_two(tmp_path: Path) -> None:
    source, out = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    source.write_text(styles.SD_FLAT.replace('"Prodigy"', '"Sophia"'))
    command = ["import", str(source), "--family", "sdxl", "-o", str(out)]
    assert cli.run(command) == 2
    assert not out.exists()
    assert cli.run([*command, "--partial"]) == 0
    assert load(str(out)).optimizer.name == "adamw"
