"""inspect and convert on files of SDXL's true structure, shrunk."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from flame_train.errors import ConfigError, ModelFileError, NonFiniteError
from flame_train.io.safetensors import SafetensorsFile
from flame_train.tools.inspect import inspect_file, render
from flame_train.tools.lora_files import convert
from tests.golden_keys import golden
from tests.tools.small_sdxl import base_tensors, lora_tensors, write


class TestConvert:
    def test_there_and_back_gives_the_same_file(self, files, tmp_path):
        convert(files / "lora.safetensors", tmp_path / "k.safetensors", "kohya")
        there = convert(tmp_path / "k.safetensors", tmp_path / "d.safetensors", "diffusers")
        back = convert(tmp_path / "d.safetensors", tmp_path / "k2.safetensors", "kohya")
        assert (there.dialects, back.dialects) == (("kohya",), ("peft",))
        assert there.modules == {"text_encoder": 72, "text_encoder_2": 192, "unet": 788}
        assert (tmp_path / "k.safetensors").read_bytes() == (tmp_path / "k2.safetensors").read_bytes()
        before = safetensors.numpy.load_file(files / "lora.safetensors")
        after = safetensors.numpy.load_file(tmp_path / "k2.safetensors")
        assert before.keys() == after.keys()
        assert all(before[k].tobytes() == after[k].tobytes() and before[k].dtype == after[k].dtype for k in before)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_values_that_are_not_finite(self, tmp_path, value):
        tensors = lora_tensors()
        tensors[next(name for name in tensors if "lora_up" in name)].flat[0] = value
        source = write(tmp_path / "lora.safetensors", tensors, {"ss_base_model_version": "sdxl_base_v1-0"})
        with pytest.raises(NonFiniteError, match=r"lora\.safetensors: its .* holds NaN or infinity"):
            convert(source, tmp_path / "out.safetensors", "diffusers")
        assert not (tmp_path / "out.safetensors").exists()

    def test_metadata_is_kept_and_completed(self, files, tmp_path):
        source = write(tmp_path / "s.safetensors", lora_tensors(), {"ss_output_name": "mine", "ss_network_dim": "99"})
        convert(source, tmp_path / "d.safetensors", "diffusers")
        with SafetensorsFile(tmp_path / "d.safetensors") as file:
            assert file.metadata["ss_output_name"] == "mine"
            assert file.metadata["ss_network_dim"] == "99"
            assert file.metadata["ss_base_model_version"] == "sdxl_base_v1-0"
            assert file.metadata["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
            assert len(file.metadata["sshs_model_hash"]) == 64
            assert not any(key.endswith(".alpha") for key in file.names)

    def test_metadata_too_long_to_write_is_reported(self, tmp_path):
        text = json.dumps({"ss_tag_frequency": "x" * 70_000})
        raw = safetensors.numpy.save(lora_tensors(), json.loads(text))
        (tmp_path / "s.safetensors").write_bytes(raw)
        report = convert(tmp_path / "s.safetensors", tmp_path / "d.safetensors", "kohya")
        assert report.dropped_metadata == ("ss_tag_frequency",)

    def test_refusals(self, files, tmp_path):
        with pytest.raises(ModelFileError, match="expected a LoRA, but this is: SDXL"):
            convert(files / "base.safetensors", tmp_path / "x.safetensors", "kohya")
        with pytest.raises(ConfigError, match="'comfy' is not known; expected one of kohya, diffusers"):
            convert(files / "lora.safetensors", tmp_path / "x.safetensors", "comfy")
        with pytest.raises(ConfigError, match="same file"):
            convert(files / "lora.safetensors", files / "lora.safetensors", "kohya")
        refiner = {"lora_unet_down_blocks_1_attentions_0_attn2_to_k.lora_down.weight": np.zeros((1, 1280))}
        write(tmp_path / "refiner.safetensors", refiner)
        with pytest.raises(ModelFileError, match=r"LoRA for SDXL refiner.*for SDXL.* only"):
            convert(tmp_path / "refiner.safetensors", tmp_path / "x.safetensors", "kohya")


class TestInspect:
    def test_a_checkpoint(self, files):
        report = inspect_file(files / "base.safetensors")
        assert (report.identity.kind, report.identity.family) == ("checkpoint", "sdxl")
        assert report.identity.parts == ("unet", "vae", "text_encoder", "text_encoder_2")
        tensors = base_tensors()
        assert report.tensors == len(tensors)
        assert report.parameters == report.dtypes["F16"].parameters == sum(t.size for t in tensors.values())
        assert report.nbytes == 2 * report.parameters
        assert report.lora is None
        assert json.loads(json.dumps(report.as_dict()))["identity"]["family"] == "sdxl"

    @pytest.mark.parametrize("to", ["kohya", "diffusers"])
    def test_a_lora(self, files, tmp_path, to):
        convert(files / "lora.safetensors", tmp_path / "x.safetensors", to)
        report = inspect_file(tmp_path / "x.safetensors")
        assert report.identity.kind == "lora"
        assert report.lora.modules == {"unet": 788, "text_encoder_2": 192, "text_encoder": 72}
        assert report.lora.ranks == {2: 1052}
        assert report.lora.alphas == {3.0: 1052}
        name = {"kohya": "attn2_to_k", "diffusers": "attn2.to_k"}[to]
        assert report.lora.targets[name] == 70
        text = render(report)
        assert f"{name} (70)" in text
        assert "rank: 2 (1052)" in text

    @pytest.mark.parametrize(
        ("name", "components"),
        [
            ("lora_kohya_flux_with_t5", {"transformer": 304, "text_encoder": 72, "text_encoder_2": 168}),
            ("lora_kohya_sd3_medium", {"transformer": 237, "text_encoder": 72, "text_encoder_2": 192}),
        ],
    )
    def test_modules_are_counted_by_the_familys_components(self, tmp_path, name, components):
        """`lora_unet` is a transformer's there, `lora_te3` Flux's second encoder; BFL's own names have no prefix."""
        tensors = {f"{m}.lora_down.weight": np.zeros((1, b["shape"][1]), np.float16) for m, b in golden(name).items()}
        report = inspect_file(write(tmp_path / "x.safetensors", tensors))
        assert report.lora.modules == components

    def test_bfls_own_names(self, tmp_path):
        tensors = {
            f"double_blocks.0.img_attn.{m}.lora_A.weight": np.zeros((1, 3072), np.float16) for m in ("qkv", "proj")
        }
        report = inspect_file(write(tmp_path / "x.safetensors", tensors))
        assert (report.lora.modules, report.identity.layout) == ({"transformer": 2}, "native")

    @pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
    def test_blocks_of_every_kind_of_tokens_count_together(self, tmp_path, prefix):
        blocks = (
            "content_mode_blocks.image.3",
            "content_mode_blocks.image_cond.0",
            "txt_mode_blocks.1",
            "single_blocks.27",
        )
        paths = [f"{block}.q_proj" for block in blocks]
        names = [prefix + (path.replace(".", "_") if prefix.endswith("_") else path) for path in paths]
        tensors = {f"{name}.lora_down.weight": np.zeros((1, 8), np.float16) for name in names}
        assert inspect_file(write(tmp_path / "x.safetensors", tensors)).lora.targets == {"q_proj": 4}

    @pytest.mark.parametrize("name", ["lora_kohya_flux", "lora_kohya_sd35_large", "lora_kohya_sd3_medium"])
    def test_loras_of_other_families_are_told_too(self, tmp_path, name):
        tensors = {f"{m}.lora_down.weight": np.zeros((1, b["shape"][1]), np.float16) for m, b in golden(name).items()}
        report = inspect_file(write(tmp_path / "x.safetensors", tensors))
        assert sum(report.lora.modules.values()) == len(golden(name))
        assert max(map(len, report.lora.targets)) < 45

    def test_metadata_cannot_steer_the_terminal(self, tmp_path):
        write(tmp_path / "x.safetensors", {}, {"title": "\x1b[2Jgone\n", "long": "é" * 500})
        text = render(inspect_file(tmp_path / "x.safetensors"))
        assert "\x1b" not in text
        assert r"title: \x1b[2Jgone\n" in text
        assert "(500 characters)" in text
