"""LoRA files that somebody made to be awkward: refused by name, whatever their numbers and names are."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters import formats, metadata
from flame_train.io.header import MAX_NAME, MAX_TENSORS
from flame_train.io.safetensors import save_file

MODULE = "lora_unet_output_blocks_8_0_skip_connection"
OF_SDXL = {"ss_base_model_version": "sdxl_base_v1-0"}
SAID = "lora_adapter_metadata"


@pytest.fixture
def lora(tmp_path):
    """lora(tensors=..., metadata=...): a small LoRA with these in it, or in place of its own."""

    def make(tensors=None, metadata=None):
        ours = {
            f"{MODULE}.lora_down.weight": np.ones((2, 64, 1, 1), np.float32),
            f"{MODULE}.lora_up.weight": np.ones((32, 2, 1, 1), np.float32),
            f"{MODULE}.alpha": np.array(2.0, np.float32),
        }
        save_file(tmp_path / "l.safetensors", ours | (tensors or {}), OF_SDXL | (metadata or {}))
        return str(tmp_path / "l.safetensors")

    return make


@pytest.fixture
def told(tmp_path, capsys):
    """What `convert` says of a file, and how it ends."""

    def run(path, to="diffusers"):
        code = cli.run(["convert", path, str(tmp_path / "out.safetensors"), "--to", to])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("part", ["lora_down.weight", "lora_up.weight", "alpha"])
@pytest.mark.parametrize("dtype", [np.complex64, np.bool_])
def test_matrices_and_alphas_that_are_no_real_numbers(lora, told, capsys, part, dtype):
    shape = {"lora_down.weight": (2, 64, 1, 1), "lora_up.weight": (32, 2, 1, 1), "alpha": ()}[part]
    path = lora({f"{MODULE}.{part}": np.ones(shape, dtype)})
    code, said = told(path)
    assert code == 3
    assert f"{MODULE}.{part} has dtype" in said
    assert cli.run(["inspect", path, "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("alpha", [1e39, -1e39, np.inf, np.nan])
def test_an_alpha_that_no_file_can_hold(lora, told, capsys, alpha):
    path = lora({f"{MODULE}.alpha": np.array(alpha, np.float64)})
    code, said = told(path)
    assert code == 3
    assert "has an alpha that is not one finite number" in said

    def refuse(constant):
        raise AssertionError(constant)

    assert cli.run(["inspect", path, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_an_alpha_of_whole_numbers_is_one(lora, told):
    assert told(lora({f"{MODULE}.alpha": np.array(2, np.int64)}))[0] == 0


@pytest.mark.parametrize("alpha", [10**39, 10**400, -(10**39), float("nan")])
@pytest.mark.parametrize("key", ["unet.lora_alpha", "unet.alpha_pattern"])
def test_scales_in_the_metadata_that_no_number_format_holds_say_nothing(alpha, key):
    value = alpha if key.endswith("lora_alpha") else {"conv": alpha}
    scale = metadata.peft_scales({SAID: json.dumps({key: value})})
    assert scale("unet", "mid.conv", 4) is None


@pytest.mark.parametrize("alpha", [10**39, 10**400, 1e39])
def test_folded_alphas_that_no_number_format_holds_say_nothing(lora, told, alpha):
    path = lora(
        {
            "unet.conv_out.lora_A.weight": np.ones((2, 320, 3, 3), np.float32),
            "unet.conv_out.lora_B.weight": np.ones((4, 2, 1, 1), np.float32),
        },
        {"flame_train.folded_alpha": json.dumps({"unet": alpha})},
    )
    code, said = told(path, "kohya")
    assert code in (0, 3, 7)
    assert "bug" not in said


def test_a_product_that_overflows_is_not_written(lora, told, tmp_path):
    path = lora(
        {
            f"{MODULE}.alpha": np.array(3e38, np.float32),
            f"{MODULE}.lora_up.weight": np.full((32, 2, 1, 1), 9, np.float32),
        }
    )
    code, said = told(path)
    assert code == 7
    assert "beyond what a file can hold" in said
    assert not (tmp_path / "out.safetensors").exists()


def test_a_name_is_compared_with_few_others(lora, told, monkeypatch):
    """All of a family's spellings are tens of thousands, and comparing takes the square of a name's length."""
    compared = []
    usual = formats.get_close_matches
    monkeypatch.setattr(formats, "get_close_matches", lambda *a, **n: (compared.append(len(a[1])), usual(*a, **n))[1])
    weights = np.ones((2, 2), np.float32)
    near = f"{MODULE}s.lora_down.weight"
    far = [
        "lora_unet_" + "lora_down_" * 90 + ".lora_down.weight",
        *(f"lora_unet_{i}.lora_down.weight" for i in range(9)),
    ]
    code, said = told(lora(dict.fromkeys((near, *far), weights)))
    assert code == 3
    assert "10 of its tensors belong to no module" in said or "11 of its tensors" in said
    assert max(compared) <= 200
    assert len(compared) <= 5
    code, said = told(lora({near: weights}))
    assert f"nearest known: {MODULE}" in said


@pytest.mark.parametrize("name", ["a" * (MAX_NAME + 1), "lora_" * 100_000 + ".alpha", "blocks.1." * 50_000])
def test_a_name_of_enormous_length_is_refused(lora, told, capsys, name):
    path = lora({name: np.ones(1, np.float32)})
    for line in (["inspect", path], ["convert", path, "out.safetensors", "--to", "kohya"]):
        assert cli.run(line) == 3
        said = capsys.readouterr().err
        assert f"has a name of {len(name)} characters; at most {MAX_NAME} are read" in said
        assert len(said) < 1000


@pytest.mark.parametrize("count", [100, 1000])
def test_names_are_matched_once_each(lora, told, monkeypatch, count):
    """The work that a name takes is looked up, not searched for among others: it grows as the count of names."""
    split, usual = [], formats.split_key
    monkeypatch.setattr(formats, "split_key", lambda key: (split.append(key), usual(key))[1])
    names = [f"{MODULE}{i}.lora_down.weight" for i in range(count)]
    code, said = told(lora(dict.fromkeys(names, np.ones(1, np.float32))))
    assert code == 3
    assert f"{count} of its tensors belong to no module" in said
    assert len(split) <= count + 10


def test_more_names_than_any_model_has_are_refused_before_any_is_matched(lora, told, monkeypatch, capsys):
    def never(*_):
        raise AssertionError("matched")

    monkeypatch.setattr(formats, "split_key", never)
    path = lora({f"a{i}": np.ones(1, np.float32) for i in range(MAX_TENSORS + 1)})
    for line in (["inspect", path], ["convert", path, "out.safetensors", "--to", "kohya"]):
        assert cli.run(line) == 3
        assert f"l.safetensors: the header lists more than {MAX_TENSORS} tensors" in capsys.readouterr().err


def test_patterns_are_looked_up_or_few():
    """One for each module is usual; each that is no plain path is tried for each module."""
    plain = {f"down.{i}.to_q": i + 1 for i in range(20_000)}
    scale = metadata.peft_scales({SAID: json.dumps({"unet.alpha_pattern": plain, "unet.lora_alpha": 2})})
    assert [scale("unet", path, 1) for path in ("down.7.to_q", "x.down.19999.to_q", "down.7.to_k")] == [8, 20_000, 2]
    first = {"to_.": 3, "down.7.to_q": 4}
    assert metadata.peft_scales({SAID: json.dumps({"unet.alpha_pattern": first})})("unet", "down.7.to_q", 1) == 3
    many = {f"to_[{i}]": 1 for i in range(200)}
    with pytest.raises(ValueError, match="has 200 patterns; at most 100 are tried"):
        metadata.peft_scales({SAID: json.dumps({"unet.alpha_pattern": many})})


@pytest.mark.parametrize("strength", ["1e39", "-1e39", "1e308"])
def test_a_strength_that_no_file_can_hold_writes_nothing(lora, tmp_path, capsys, strength):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"the one before")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = cli.run(["merge", "--to", "lora", "--lora", f"{lora()}:{strength}", "-o", str(target), "--force"])
    assert code == 7
    assert "too large" in capsys.readouterr().err
    assert target.read_bytes() == b"the one before"
