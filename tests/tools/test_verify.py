"""verify: its tables against what is known of the three programs from their issue trackers and our own use of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import to_diffusers, to_kohya
from flame_train.adapters.kinds.dora import DoraFactors
from flame_train.adapters.kinds.loha import LohaFactors
from flame_train.adapters.targets import layer_shapes
from flame_train.io.safetensors import save_file
from flame_train.models.registry import FAMILIES
from flame_train.models.sdxl.names import lora_family
from flame_train.tools.verify import render, verify
from tests.golden_keys import golden

SDXL = lora_family()
ATTENTION = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"


@pytest.fixture
def verdicts(tmp_path):
    """Program -> what it takes of a file of these tensors."""

    def of(tensors, **metadata):
        save_file(tmp_path / "x.safetensors", tensors, metadata)
        return {reader.program: reader for reader in verify(tmp_path / "x.safetensors")}

    return of


def kohya(name):
    """sd-scripts' file of a list of modules."""
    ends = {".lora_down.weight": (1, 8), ".lora_up.weight": (8, 1), ".alpha": ()}
    found = {}
    for module, about in golden(name).items():
        out, into, *kernel = about["shape"]
        shapes = {
            ".lora_down.weight": (1, into, *kernel),
            ".lora_up.weight": (out, 1, *[1] * len(kernel)),
            ".alpha": (),
        }
        found |= {module + end: np.zeros(shapes[end], np.float16) for end in ends}
    return found


def peft(name):
    """diffusers' own file of a list of modules, without alpha."""
    return {key: np.zeros(shape, np.float16) for key, shape in _peft_shapes(name).items()}


def _peft_shapes(name):
    return {key: shape for targets in golden(name).values() for key, shape in targets.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lora_kohya_sdxl", "yes yes yes"),
        ("lora_kohya_sdxl_conv", "yes yes yes"),
        ("lora_kohya_sd3_medium", "yes yes no"),  # there is no converter: kohya-ss/sd-scripts#1743
        ("lora_kohya_sd35_large", "yes yes no"),
        ("lora_kohya_flux", "yes yes yes"),
    ],
)
def test_files_of_sd_scripts(verdicts, name, expected):
    found = verdicts(kohya(name))
    assert " ".join(found[p].verdict for p in ("ComfyUI", "Forge", "diffusers")) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lora_peft_sdxl", "part no yes"),  # attention is looked for as `attn1.processor.to_q`
        ("lora_peft_sd3_medium", "yes no yes"),  # Forge has that part of ComfyUI's map commented out
        ("lora_peft_sd35_medium", "yes no yes"),
        ("lora_peft_flux", "yes yes yes"),
    ],
)
def test_files_of_diffusers(verdicts, name, expected):
    found = verdicts(peft(name))
    assert " ".join(found[p].verdict for p in ("ComfyUI", "Forge", "diffusers")) == expected
    assert found["Forge"].refused == (found["Forge"].verdict == "no")


def test_diffusers_drops_flux_outer_layers_in_kohyas_naming(verdicts):
    shapes = {".lora_down.weight": (1, 64), ".lora_up.weight": (3072, 1), ".alpha": ()}
    outer = {f"lora_unet_img_in{end}": np.zeros(shape, np.float32) for end, shape in shapes.items()}
    found = verdicts(kohya("lora_kohya_flux") | outer)
    assert {p: r.left for p, r in found.items()} == {"ComfyUI": (), "Forge": (), "diffusers": tuple(sorted(outer))}


def layer(module, out=640, into=640):
    return {module: LoraFactors(np.zeros((2, into), np.float32), np.zeros((out, 2), np.float32), 2.0)}


def test_a_kind_that_diffusers_does_not_read(verdicts, tmp_path, capsys):
    shapes = {"hada_w1_a": (640, 2), "hada_w1_b": (2, 640), "hada_w2_a": (640, 2), "hada_w2_b": (2, 640)}
    loha = LohaFactors({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, 2.0)
    found = verdicts(to_kohya({"unet": {ATTENTION: loha}}, SDXL))
    assert {p: r.verdict for p, r in found.items()} == {"ComfyUI": "yes", "Forge": "yes", "diffusers": "no"}
    assert cli.run(["verify", str(tmp_path / "x.safetensors")]) == 0
    assert (
        capsys.readouterr().out.count("merge BASE --to lora --lora FILE --rank N -o OUT writes the nearest LoRA") == 1
    )


@pytest.mark.parametrize(
    ("form", "key", "lacking"),
    [("kohya", ".dora_scale", {"diffusers"}), ("diffusers", ".lora_magnitude_vector", {"ComfyUI", "Forge"})],
)
def test_a_magnitude_that_is_dropped_is_named(verdicts, form, key, lacking):
    module = "input_blocks.4.1.transformer_blocks.0.ff.net.2"
    dora = {module: DoraFactors(layer(module)[module], np.ones((640, 1), np.float32))}
    tensors = to_kohya({"unet": dora}, SDXL) if form == "kohya" else to_diffusers({"unet": dora}, SDXL)[0]
    found = verdicts(tensors)
    assert {p for p, r in found.items() if any(name.endswith(key) for name in r.left)} == lacking
    wrong = {"ComfyUI", "Forge"} if form == "kohya" else set()  # they take it, and divide by other norms
    assert {p for p, r in found.items() if r.verdict == "part"} == lacking | wrong


def test_an_alpha_in_diffusers_names_of_sd3_is_not_taken_there(verdicts):
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": np.zeros((2, 1536)), f"{name}.lora_B.weight": np.zeros((1536, 2))}
    assert verdicts(tensors)["diffusers"].verdict == "yes"
    assert verdicts(tensors | {f"{name}.alpha": np.float32(1)})["diffusers"].verdict == "no"


def test_a_block_that_the_model_has_not_is_taken_by_nobody(verdicts):
    tensors = to_kohya({"unet": layer(ATTENTION)}, SDXL)
    stray = {key.replace("blocks_4_1", "blocks_99_1"): array for key, array in tensors.items()}
    for reader in verdicts(tensors | stray).values():
        assert (reader.verdict, reader.taken, set(reader.left)) == ("part", 3, set(stray))


def test_alphas_that_diffusers_loses_are_told_and_converting_mends_them(tmp_path, verdicts, capsys):
    """Two of four layers are attention with an alpha of their own, so that no alpha is the commonest."""
    found = {**layer(ATTENTION), **layer(ATTENTION.replace("to_q", "to_k"))}
    others = [ATTENTION.replace("attn1.to_q", end) for end in ("ff.net.2", "ff.net.0.proj")]
    found |= {m: LoraFactors(f.down, f.up, 8.0) for other in others for m, f in layer(other).items()}
    readers = verdicts(to_kohya({"unet": found}, SDXL))
    assert {p: r.verdict for p, r in readers.items()} == {"ComfyUI": "yes", "Forge": "yes", "diffusers": "part"}
    (sentence,) = readers["diffusers"].otherwise
    assert sentence.startswith("2 attention layers may get the alpha of most layers")
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    assert cli.run(["convert", str(source), str(target), "--to", "kohya"]) == 0
    assert {reader.verdict for reader in verify(target)} == {"yes"}
    capsys.readouterr()
    assert cli.run(["verify", str(source)]) == 0
    assert f"    computed otherwise: {sentence}" in capsys.readouterr().out


def test_norms_of_output_rows_are_told_for_programs_that_take_them_for_others(verdicts):
    rows = {ATTENTION: DoraFactors(layer(ATTENTION)[ATTENTION], np.ones((640, 1), np.float32))}
    columns = {ATTENTION: DoraFactors(layer(ATTENTION)[ATTENTION], np.ones((1, 640), np.float32))}
    told = {p: len(r.otherwise) for p, r in verdicts(to_kohya({"unet": rows}, SDXL)).items()}
    assert told == {"ComfyUI": 1, "Forge": 1, "diffusers": 0}
    assert not any(reader.otherwise for reader in verdicts(to_kohya({"unet": columns}, SDXL)).values())


def test_what_is_said(tmp_path, capsys):
    save_file(tmp_path / "x.safetensors", peft("lora_peft_sd3_medium"))
    assert cli.run(["verify", str(tmp_path / "x.safetensors")]) == 0
    text = capsys.readouterr().out
    assert "  ComfyUI 0.3.64 (2025-10-12): yes, " in text
    assert "it then applies none\n    not taken: transformer." in text
    assert cli.run(["verify", str(tmp_path / "x.safetensors"), "--json"]) == 0
    programs = json.loads(capsys.readouterr().out)["programs"]
    assert {p["program"]: p["verdict"] for p in programs} == {"ComfyUI": "yes", "Forge": "no", "diffusers": "yes"}


TUCKER = {
    "LoHa": {**dict.fromkeys(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), (2, 8)), "hada_t1": (2, 2, 3, 3)},
    "LoKr": {"lokr_w1": (2, 2), "lokr_w2_a": (2, 4), "lokr_w2_b": (2, 4), "lokr_t2": (2, 2, 3, 3)},
    "LoCon": {"lora_down.weight": (2, 8, 1, 1), "lora_up.weight": (8, 2, 1, 1), "lora_mid.weight": (2, 2, 3, 3)},
}


@pytest.mark.parametrize("kind", TUCKER)
@pytest.mark.parametrize("command", ["verify", "convert", "resize", "sample"])
def test_a_tucker_file_is_refused_with_its_kind_and_what_to_do(tmp_path, small_base, capsys, kind, command):
    path = str(tmp_path / "x.safetensors")
    save_file(path, {f"lora_unet_input_blocks_1_0_in_layers_2.{end}": np.zeros(s) for end, s in TUCKER[kind].items()})
    more = {
        "convert": [f"{tmp_path}/y.safetensors", "--to", "kohya"],
        "resize": ["--rank", "1", "-o", f"{tmp_path}/y.safetensors"],
    }
    words = [command, path, *more.get(command, [])]
    if command == "sample":
        words = [
            "sample",
            "-m",
            str(small_base),
            "--lora",
            path,
            "-p",
            "a",
            "-o",
            f"{tmp_path}/y.png",
            "--device",
            "cpu",
        ]
    assert cli.run(words) == 3
    said = capsys.readouterr().err
    assert f"Tucker-decomposed {kind}" in said
    assert "without use_tucker" in said
    assert "flame-train extract" in said
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_what_is_no_lora_is_refused(small_base, capsys):
    assert cli.run(["verify", str(small_base)]) == 3
    assert "expected a LoRA, but this is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "diffusers"),
    [("zimage", "yes"), ("krea2", "yes"), ("anima", "no"), ("chroma", "part"), ("flux2", "part"), ("flux3", "")],
)
def test_families_that_comfyui_learnt_later_have_its_later_version(tmp_path, family, diffusers):
    """In kohya's names all take; in diffusers' those whose paths its `model_lora_keys_unet` asks a table for."""
    own = FAMILIES[family]
    network = own.published[own.small]()[own.denoiser]
    names = own.lora_names_in({})
    shapes = {n: s for n, s in layer_shapes(network).items() if n in names.components[0].modules}
    state = {own.denoiser: {n: LoraFactors(np.zeros((2, s[1])), np.zeros((s[0], 2)), 2.0) for n, s in shapes.items()}}
    verdicts = []
    for tensors in (to_kohya(state, names), to_diffusers(state, names)[0]):
        save_file(tmp_path / "x.safetensors", {name: array.astype(np.float32) for name, array in tensors.items()})
        comfyui, forge, _ = verify(tmp_path / "x.safetensors")
        assert (forge.verdict, forge.lacks) == ("not checked", own.title)
        verdicts.append((comfyui.version, comfyui.verdict))
    known = [("0.38.1", "yes"), ("0.38.1", diffusers)]
    assert verdicts == (known if diffusers else [("0.3.64", "not checked")] * 2)
    told = render(tmp_path / "x.safetensors", verify(tmp_path / "x.safetensors"))
    assert f"  Forge 2.0.1v1.10.1 (2025-06-26): not checked: its key map here does not know {own.title}" in told
