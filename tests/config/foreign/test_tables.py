"""The tables of other trainers' settings lead to keys that exist, and name each setting once."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

import pytest

from flame_train.config.conversion import set_keys
from flame_train.config.foreign import sd_scripts
from flame_train.config.foreign.recognize import PROGRAMS
from flame_train.config.foreign.table import Program, Row
from flame_train.config.keys import keys, sections

from .sd_scripts_arguments import ARGUMENTS

COMING = frozenset(
    [
        *(f"captions.{name}" for name in ("shuffle", "keep_tokens", "keep_separator", "separator", "tag_dropout")),
        *(f"captions.{name}" for name in ("prefix", "suffix", "wildcards", "trigger", "variants")),
        *(f"data.{name}" for name in ("flip", "random_crop", "masks", "mask_folder", "mask_weight", "mask_normalize")),
        *(f"data.{name}" for name in ("brightness", "contrast", "saturation", "hue", "resolutions")),
        *(f"data.sets.{name}" for name in ("regularization", "regularization_weight")),
    ]
)
"""Keys of captions and images, which are written elsewhere at the same time. Until they are there, `import`
lists their settings as without counterpart."""


@cache
def known() -> frozenset[str]:
    return frozenset([*keys(), *COMING, *(f"data.sets.{name}" for name in set_keys())])


def exists(path: str) -> bool:
    """A key of the schema, or one of a set of images, in its own table or in [data] or [captions]."""
    section, _, name = path.partition(".")
    places = [name, f"data.{name}", f"data.sets.{name}"] if section == "set" else [path]
    return any(place in known() for place in places)


each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def rows(program: Program) -> tuple[Row, ...]:
    return (*program.table().rows, *program.table().set_rows)


@each_program
def test_every_row_leads_to_keys_that_exist(program: Program) -> None:
    assert {
        row.key: missing for row in rows(program) if (missing := [path for path in row.to if not exists(path)])
    } == {}


@each_program
def test_a_place_is_no_part_of_a_name(program: Program) -> None:
    assert [row.key for row in rows(program) if "@" in row.key] == []


@each_program
def test_a_setting_is_answered_by_one_row_of_a_family(program: Program) -> None:
    for table in (program.table().rows, program.table().set_rows):
        plain = [(row.key, row.families) for row in table if "*" not in row.key]
        assert len(plain) == len(set(plain)), sorted(key for key in plain if plain.count(key) > 1)


@each_program
def test_no_sentence_names_a_key_that_does_not_exist(program: Program) -> None:
    """Sentences answer unknown keys: one that named an unknown key would go in a circle."""
    begins = sections()
    for row in rows(program):
        words = [word.strip(".,:;()[]`") for word in row.say.split()]
        named = [word for word in words if word.partition(".")[0] in begins and "." in word and word != "log.jsonl"]
        assert all(exists(word) for word in named), f"{row.key}: {row.say}"


PACKED = frozenset({"optimizer_args", "lr_scheduler_args", "network_args", "dataset_config", "model_type"})
"""Arguments that are taken apart, or whose file is read, before rows are asked."""

FORKS = frozenset({"flow_model", "flow_matching"})
"""Arguments of programs that were made of sd-scripts."""


def test_every_argument_of_sd_scripts_is_known() -> None:
    arguments = {name for names in ARGUMENTS.values() for name in names.split()}
    assert len(arguments) > 200
    unknown = {
        name for name in arguments - PACKED if not any(fnmatchcase(name, row.key) for row in rows(sd_scripts.PROGRAM))
    }
    assert not unknown


def test_rows_of_sd_scripts_have_their_place() -> None:
    assert {row.key for row in rows(sd_scripts.PROGRAM) if not row.at and not row.key.startswith("(")} == FORKS
