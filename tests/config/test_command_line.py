"""A shell script that starts a trainer: where its command ends, and what its variables are."""

from __future__ import annotations

from typing import Any

import pytest

from flame_train.config.command_line import Unset, parse_command_line
from flame_train.errors import ConfigError


def options(text: str) -> dict[str, Any]:
    tree, _ = parse_command_line(text, "run.sh")
    return {name: value for name, value in tree.items() if name}


@pytest.mark.parametrize(
    "after",
    [
        '\necho "done: $OUT"\n',
        " || exit 1\ncp out/*.safetensors /b\n",
        " && echo it is done",
        "; echo 'more'",
        " > log.txt 2>&1 &",
        " 2>&1 | tee log.txt",
        " # the name\n",
        "\n\nif [ 1 ]; then\n  echo 'it''s'\nfi\n",
        "\r\npause\r\n",
    ],
)
def test_a_command_ends_where_the_shell_ends_it(after: str) -> None:
    found = options(f"accelerate launch \\\n  train_network.py --seed 1 \\\n  --output_name fox{after}")
    assert found == {"seed": "1", "output_name": "fox"}


def test_what_stands_in_quotes_ends_nothing() -> None:
    found = options(
        """python train_network.py --caption_separator ";" --keep_tokens_separator '|||' --x "a && b # c" --y a;b"""
    )
    assert found == {"caption_separator": ";", "keep_tokens_separator": "|||", "x": "a && b # c", "y": "a;b"}


SCRIPT = """\
#!/bin/bash
# train_network.py is started below
ROOT="${ROOT:-/models}"
export DIT=$ROOT/dit.safetensors; DIM="${DIM:-${NETWORK_DIM:-64}}"   # rank
EXTRA="${EXTRA:-}"
FOUND=$(find "$ROOT" -name vae)
if [ -n "$FAST" ]; then
  LR=1e-3
fi
FLAGS=(
  --dit "$DIT"
  # --seed 3 (not now)
  --network_dim $DIM
)
FLAGS+=( --output_name "a fox" )
TRAINER="$MUSUBI/zimage_train_network.py"
uv run accelerate launch --mixed_precision bf16 "$TRAINER" \\
  "${FLAGS[@]}" --vae $FOUND --learning_rate "$LR" --sdpa $EXTRA
DIM=128
"""


def test_variables_that_the_script_sets_are_put_in() -> None:
    tree, lines = parse_command_line(SCRIPT, "run.sh")
    assert tree.pop("") == "zimage_train_network.py"
    assert tree == {
        "dit": "/models/dit.safetensors",
        "network_dim": "64",
        "output_name": "a fox",
        "vae": "$FOUND",
        "learning_rate": "$LR",
        "sdpa": True,
    }
    assert {name for name, value in tree.items() if isinstance(value, Unset)} >= {"vae", "learning_rate"}
    assert lines["vae",] == 18


@pytest.mark.parametrize(
    "text",
    [
        '$rate = "1e-4" # the rate\naccelerate launch `\n "./x/train_network.py" `\n --learning_rate=$rate',
        "set rate=1e-4\npython train_network.py ^\n --learning_rate %rate%",
    ],
)
def test_variables_of_powershell_and_of_batch_files(text: str) -> None:
    assert options(text) == {"learning_rate": "1e-4"}


def test_options_that_no_line_names_stop_it() -> None:
    with pytest.raises(ConfigError, match=r"run\.sh:2: \$\{FLAGS\[@\]\}: expected options"):
        options('python train_network.py \\\n  "${FLAGS[@]}"\n')


def test_a_variable_made_of_itself_does_not_grow_without_end() -> None:
    text = "A=aaaaaaaa\n" + "A=$A$A\n" * 60 + "python train_network.py --seed $A\n"
    assert len(options(text)["seed"]) < 20_000
