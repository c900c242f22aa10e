"""In which numbers other trainers keep a model: each format has ours, the nearest with a remark, or is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.foreign.test_meaning import MUSUBI, MUSUBI_SET, imported, job, trainer, tuner

FEWER, WHOLE = "fewer than 8 bits are nf4 here", "products in int8"


def carried(result: dict[str, Any], key: str) -> tuple[Any, str]:
    """A value with its remark; None where it has its default."""
    found = result["carried"].get(key, {"value": None, "from": ""})
    return found["value"], found["from"].partition("; ")[2]


@pytest.mark.parametrize(
    ("theirs", "ours", "remark"),
    [
        ("int8-sdnq", "int8", ""),
        ("uint8-sdnq", "int8", ""),
        ("int8dq-torchao", "int8", ""),
        ("fp8uz-quanto", "fp8", ""),
        ("nf4-bnb", "nf4", ""),
        ("uint5-sdnq", "nf4", FEWER),
        ("int4-quanto", "nf4", FEWER),
        ("int16-sdnq", None, ""),
        ("fp16-sdnq", None, ""),
        ("no_change", None, ""),
    ],
)
def test_simpletuner(tmp_path: Path, theirs: str, ours: str | None, remark: str) -> None:
    result = imported(tmp_path, tuner(base_model_precision=theirs, text_encoder_2_precision=theirs))
    for key in ("model.quantize", "text_encoders.precision"):
        value, said = carried(result, key)
        assert value == ours
        assert said.startswith(remark)
        assert bool(said) == bool(remark)


def test_a_format_that_nobody_knows_is_told(tmp_path: Path) -> None:
    for files in (tuner(base_model_precision="BEST"), trainer(transformer={"weight_dtype": "BEST"})):
        result = imported(tmp_path, files)
        assert "model.quantize" not in result["carried"]
        assert any("no such number format here: BEST" in line for line in result["listed"])


def test_onetrainer_multiplies_text_encoders_in_8_bits_too(tmp_path: Path) -> None:
    dtype = {"weight_dtype": "INT_W8A8"}
    result = imported(tmp_path, trainer(transformer=dtype, text_encoder_2=dtype))
    assert carried(result, "model.quantize") == ("int8", 'products in 8 bits, as there, are model.arithmetic = "int8"')
    assert carried(result, "text_encoders.precision") == ("int8", "their products are in 16 bits here")


@pytest.mark.parametrize(
    ("theirs", "model", "text"),
    [
        ("qfloat8", ("fp8", ""), ("fp8", "")),
        ("uint8", ("int8", ""), ("int8", "")),
        ("convrot8", ("int8-convrot", WHOLE), ("int8", "text encoders are not rotated here")),
        ("convrotint7", ("nf4", FEWER), ("nf4", FEWER)),
    ],
)
def test_ai_toolkit(tmp_path: Path, theirs: str, model: tuple[str, str], text: tuple[str, str]) -> None:
    how = f"arch: flux, quantize: true, qtype: {theirs}, qtype_te: {theirs}"
    result = imported(tmp_path, {"j.yaml": job(model=how)})
    for key, (ours, remark) in {"model.quantize": model, "text_encoders.precision": text}.items():
        value, said = carried(result, key)
        assert value == ours
        assert said.startswith(remark)
        assert bool(said) == bool(remark)


@pytest.mark.parametrize(
    ("options", "arithmetic", "remark"),
    [
        ("--convrot_int8", None, WHOLE),
        ("--convrot_int8 --convrot_int8_bwd bf16", None, WHOLE),
        ("--convrot_int8 --convrot_int8_bwd int8", "int8", ""),
    ],
)
def test_musubi_tuners_rotation(tmp_path: Path, options: str, arithmetic: str | None, remark: str) -> None:
    named = {"script": "krea2_train_network.py", "module": "networks.lora_krea2", "levels": "shift"}
    command = MUSUBI.format(**named).replace("--fp8_base", options)
    result = imported(tmp_path, {"run.sh": command, "set.toml": MUSUBI_SET})
    value, said = carried(result, "model.quantize")
    assert (value, carried(result, "model.arithmetic")[0]) == ("int8-convrot", arithmetic)
    assert said.startswith(remark)
    assert bool(said) == bool(remark)
