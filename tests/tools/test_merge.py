"""merge on files of SDXL's true structure, shrunk, against NumPy in fp64."""

from __future__ import annotations

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from flame_train.errors import ConfigError, ModelFileError, NonFiniteError
from flame_train.families import FAMILY_TITLES
from flame_train.io.safetensors import SafetensorsFile
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.golden_keys import golden
from tests.tools.small_sdxl import BF16, TE1, TE2, base_tensors, lora_tensors, small, write


def stored_place(module, base):
    """The single-file tensor of a line in kohya's list, and which third of its rows; by hand, not by the tables."""
    name = base["base"]
    if module.startswith("lora_unet"):
        return name, None
    if module.startswith("lora_te1"):
        return TE1 + name, None
    name = name.replace("text_model.encoder.layers.", "transformer.resblocks.")
    name = name.replace("mlp.fc1", "mlp.c_fc").replace("mlp.fc2", "mlp.c_proj")
    for third, part in enumerate(("q_proj", "k_proj", "v_proj")):
        if f"self_attn.{part}" in name:
            return TE2 + name.replace(f"self_attn.{part}.weight", "attn.in_proj_weight"), third
    return TE2 + name.replace("self_attn.out_proj", "attn.out_proj"), None


def expected_merge(base, lora, strength):
    """The merged tensors in fp64, and for each the sum of the sizes of what was added up."""
    total = {name: value.astype(np.float64) for name, value in base.items()}
    sizes = {name: np.abs(value) for name, value in total.items()}
    for module, line in golden("lora_kohya_sdxl_conv").items():
        down = lora[f"{module}.lora_down.weight"].astype(np.float64)
        up = lora[f"{module}.lora_up.weight"].astype(np.float64)
        up = up.reshape(up.shape[:2])
        scale = strength * float(lora[f"{module}.alpha"]) / len(down)
        name, third = stored_place(module, line)
        rows = slice(None) if third is None else slice(third * len(up), (third + 1) * len(up))
        total[name][rows] += scale * np.tensordot(up, down, 1)
        sizes[name][rows] += abs(scale) * np.tensordot(np.abs(up), np.abs(down), 1)
    return total, sizes


class TestMerge:
    @pytest.mark.parametrize(
        ("dtype", "eps", "strength"), [(np.float16, 2**-11, 1.0), (BF16, 2**-8, -0.3), (np.float32, 2**-24, -0.3)]
    )
    def test_against_numpy(self, tmp_path, dtype, eps, strength):
        base, lora = base_tensors(dtype), lora_tensors()
        write(tmp_path / "base.safetensors", base)
        write(tmp_path / "lora.safetensors", lora)
        report = merge(
            tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors", strength
        )
        expected, sizes = expected_merge(base, lora, strength)
        changed = 0
        with SafetensorsFile(tmp_path / "out.safetensors") as out:
            assert set(out.names) == set(base)
            for name, before in base.items():
                after = out.read(name)
                assert (after.dtype, after.shape) == (before.dtype, before.shape)
                if np.array_equal(expected[name], before.astype(np.float64)):
                    assert after.tobytes() == before.tobytes()
                else:
                    changed += 1
                    wrong = np.abs(after.astype(np.float64) - expected[name])
                    # one rounding to the stored dtype, a few in fp32 before it
                    assert np.all(wrong <= eps * np.abs(expected[name]) + 8 * 2**-24 * sizes[name])
        assert report.modules == {"unet": 788, "text_encoder": 72, "text_encoder_2": 192}
        assert changed == report.changed_tensors == 788 + 72 + 32 * 4  # q, k and v of bigG share a tensor
        assert report.skipped == {}

    def test_strength_zero_changes_nothing(self, files, tmp_path):
        merge(files / "base.safetensors", files / "lora.safetensors", tmp_path / "out.safetensors", 0.0)
        before = safetensors.numpy.load_file(files / "base.safetensors")
        after = safetensors.numpy.load_file(tmp_path / "out.safetensors")
        assert all(np.array_equal(before[name], after[name]) for name in before)

    def test_metadata_keeps_what_is_still_true(self, files, tmp_path):
        merge(files / "base.safetensors", files / "lora.safetensors", tmp_path / "1.safetensors", 0.5)
        merge(tmp_path / "1.safetensors", files / "lora.safetensors", tmp_path / "2.safetensors", -0.5)
        with SafetensorsFile(tmp_path / "2.safetensors") as out:
            assert out.metadata["modelspec.title"] == "base"
            assert "modelspec.hash_sha256" not in out.metadata
            assert json.loads(out.metadata["flame_train.merged"]) == [
                {"lora": "lora.safetensors", "strength": 0.5},
                {"lora": "lora.safetensors", "strength": -0.5},
            ]

    def test_a_diffusers_lora_gives_the_same_model(self, files, tmp_path):
        convert(files / "lora.safetensors", tmp_path / "peft.safetensors", "diffusers")
        merge(files / "base.safetensors", files / "lora.safetensors", tmp_path / "a.safetensors", 1.0)
        merge(files / "base.safetensors", tmp_path / "peft.safetensors", tmp_path / "b.safetensors", 1.0)
        a = safetensors.numpy.load_file(tmp_path / "a.safetensors")
        b = safetensors.numpy.load_file(tmp_path / "b.safetensors")
        assert all(np.array_equal(a[name], b[name]) for name in a)

    @pytest.mark.parametrize("shards", [1, 3])
    def test_a_component_folder(self, files, tmp_path, shards):
        rng = np.random.default_rng(0)
        unet = {n: rng.standard_normal(small(s)).astype(np.float16) for n, s in golden("sdxl_diffusers_unet").items()}
        folder = tmp_path / "unet"
        if shards == 1:
            write(folder / "diffusion_pytorch_model.safetensors", unet)
        else:
            place = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(unet)}
            for file in set(place.values()):
                write(folder / file, {n: v for n, v in unet.items() if place[n] == file})
            index = json.dumps({"weight_map": place})
            (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(index)
        report = merge(folder, files / "lora.safetensors", tmp_path / "out.safetensors", 1.0)
        assert (report.modules, report.skipped) == ({"unet": 788}, {"text_encoder": 72, "text_encoder_2": 192})
        out = safetensors.numpy.load_file(tmp_path / "out.safetensors")
        lora = lora_tensors()
        name = "lora_unet_input_blocks_4_1_transformer_blocks_1_attn2_to_k"
        delta = 1.5 * lora[f"{name}.lora_up.weight"].astype(float) @ lora[f"{name}.lora_down.weight"].astype(float)
        there = "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k.weight"
        np.testing.assert_allclose(out[there].astype(float), unet[there].astype(float) + delta, rtol=2e-3, atol=2e-3)

    def test_a_text_encoder_on_its_own(self, files, tmp_path):
        names = {n: s for n, s in golden("clip_l").items() if "layers.0." in n or "embeddings" in n}
        write(tmp_path / "te" / "model.safetensors", {n: np.zeros(s, np.float32) for n, s in names.items()})
        module = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
        lora = {f"{module}.lora_down.weight": np.ones((1, 768), np.float32)}
        lora |= {f"{module}.lora_up.weight": np.ones((768, 1), np.float32)}
        write(tmp_path / "lora.safetensors", lora)
        report = merge(tmp_path / "te", tmp_path / "lora.safetensors", tmp_path / "out.safetensors", 2.0)
        assert report.modules == {"text_encoder": 1}
        out = safetensors.numpy.load_file(tmp_path / "out.safetensors")
        assert np.all(out["text_model.encoder.layers.0.self_attn.q_proj.weight"] == 2)

    def test_memory_stays_at_a_few_tensors(self, tmp_path):
        """40 weights of 1 MiB each, all merged: never more than a handful in memory."""
        block = "model.diffusion_model.input_blocks.8.1.transformer_blocks"
        base = {f"{block}.{i}.attn1.to_{p}.weight": np.zeros((512, 512), np.float32) for i in range(10) for p in "qkv"}
        base["model.diffusion_model.input_blocks.0.0.weight"] = np.zeros((320, 4, 3, 3), np.float32)
        base["model.diffusion_model.label_emb.0.0.weight"] = np.zeros((8, 8), np.float32)
        lora = {}
        for i in range(10):
            for p in "qkv":
                name = f"lora_unet_input_blocks_8_1_transformer_blocks_{i}_attn1_to_{p}"
                lora[f"{name}.lora_down.weight"] = np.ones((1, 512), np.float32)
                lora[f"{name}.lora_up.weight"] = np.ones((512, 1), np.float32)
        write(tmp_path / "base.safetensors", base)
        write(tmp_path / "lora.safetensors", lora)
        del base, lora
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "warm.safetensors", 1.0)
        tracemalloc.start()
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors", 1.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 12 * 2**20


class TestMergeRefusals:
    def check(self, base, lora, out, match, error=ModelFileError, strength=1.0):
        with pytest.raises(error, match=rf"(?s){match}"):
            merge(base, lora, out, strength)
        assert not out.exists()

    def test_swapped_files(self, files, tmp_path):
        base, lora, out = files / "base.safetensors", files / "lora.safetensors", tmp_path / "out.safetensors"
        self.check(lora, base, out, r"lora\.safetensors: expected a base model, but this is: LoRA for SDXL")
        self.check(base, base, out, r"base\.safetensors: expected a LoRA, but this is: SDXL .*checkpoint")

    @pytest.mark.parametrize("name", ["lora_kohya_flux", "lora_kohya_sd35_large"])
    def test_a_lora_of_another_family(self, files, tmp_path, name):
        tensors = {}
        for module, line in golden(name).items():
            tensors[f"{module}.lora_down.weight"] = np.zeros((1, line["shape"][1]), ml_dtypes.float8_e4m3fn)
            tensors[f"{module}.lora_up.weight"] = np.zeros((line["shape"][0], 1), ml_dtypes.float8_e4m3fn)
        lora = write(tmp_path / "lora.safetensors", tensors)
        self.check(files / "base.safetensors", lora, tmp_path / "out.safetensors", "LoRA for (Flux|SD3).*is SDXL")

    def test_an_sd1_lora(self, files, tmp_path):
        name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
        tensors = {f"{name}.lora_down.weight": np.zeros((1, 768)), f"{name}.lora_up.weight": np.zeros((640, 1))}
        lora = write(tmp_path / "lora.safetensors", tensors)
        self.check(files / "base.safetensors", lora, tmp_path / "out.safetensors", "Stable Diffusion 1.x.*is SDXL")

    def test_another_family_as_base(self, files, tmp_path):
        base = write(tmp_path / "base.safetensors", {"double_blocks.0.img_attn.norm.key_norm.scale": np.zeros(128)})
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", "LoRA for SDXL.*is Flux.1 schnell")

    def test_a_base_that_nothing_is_known_of(self, files, tmp_path):
        base = write(tmp_path / "base.safetensors", {"odd.weight": np.zeros(1)})
        words = f"not a model that is known here.*merged into {', '.join(FAMILY_TITLES.values())} only"
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", words)

    def test_modules_without_a_place_are_listed(self, files, tmp_path):
        tensors = base_tensors()
        del tensors["model.diffusion_model.middle_block.1.proj_in.weight"]
        base = write(tmp_path / "base.safetensors", tensors)
        words = (
            "1 of its modules do not fit.*middle_block.1.proj_in is not in the base .nearest: middle_block.1.proj_out"
        )
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", words)

    def test_shapes_that_differ(self, files, tmp_path):
        tensors = base_tensors()
        tensors["model.diffusion_model.middle_block.1.proj_in.weight"] = np.zeros((7, 4), np.float16)
        base = write(tmp_path / "base.safetensors", tensors)
        words = r"middle_block.1.proj_in is \(4, 4\) in the LoRA, \(7, 4\) in the base"
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", words)

    @pytest.mark.parametrize(("dtype", "tag"), [(np.int8, "I8"), (np.uint8, "U8")])
    def test_a_base_that_another_program_quantised(self, files, tmp_path, dtype, tag):
        tensors = base_tensors()
        name = "model.diffusion_model.middle_block.1.proj_in.weight"
        tensors[name] = tensors[name].astype(dtype)
        base = write(tmp_path / "base.safetensors", tensors)
        words = rf"unet middle_block\.1\.proj_in is stored as {tag}, quantised by another program"
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", words)

    def test_nothing_in_common(self, files, tmp_path):
        lora = write(tmp_path / "lora.safetensors", lora_tensors(keep=lambda m: m.startswith("lora_te1")))
        tensors = {n: v for n, v in base_tensors().items() if n.startswith("model.diffusion")}
        base = write(tmp_path / "base.safetensors", tensors)
        self.check(base, lora, tmp_path / "out.safetensors", "nothing to merge")

    def test_a_whole_diffusers_folder(self, files, tmp_path):
        unet = {n: np.zeros(small(s), np.float16) for n, s in golden("sdxl_diffusers_unet").items()}
        write(tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors", unet)
        self.check(tmp_path / "model", files / "lora.safetensors", tmp_path / "out.safetensors", "such as .*model/unet")

    def test_files_are_not_overwritten(self, files):
        base, lora = files / "base.safetensors", files / "lora.safetensors"
        for out in (base, lora):
            before = out.read_bytes()
            with pytest.raises(ConfigError, match="would overwrite"):
                merge(base, lora, out, 1.0)
            assert out.read_bytes() == before

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (np.nan, r"lora\.safetensors: its unet middle_block\.1\.proj_in holds NaN or infinity"),
            (np.inf, r"lora\.safetensors: its unet middle_block\.1\.proj_in holds NaN or infinity"),
            (60000.0, r"middle_block\.1\.proj_in\.weight: the merged weights are too large for F16; try a smaller"),
        ],
    )
    def test_loras_that_are_or_become_infinite(self, files, tmp_path, value, words):
        tensors = lora_tensors()
        tensors["lora_unet_middle_block_1_proj_in.lora_up.weight"][:] = value
        lora = write(tmp_path / "lora.safetensors", tensors)
        self.check(files / "base.safetensors", lora, tmp_path / "out.safetensors", words, NonFiniteError, 10.0)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("model.diffusion_model.middle_block.1.proj_in.weight", np.nan),
            ("model.diffusion_model.middle_block.1.norm.bias", -np.inf),
            ("first_stage_model.decoder.conv_in.weight", -np.inf),
            (TE2 + "transformer.resblocks.0.attn.in_proj_weight", np.nan),
        ],
    )
    def test_a_base_with_a_broken_tensor_whether_touched_or_not(self, files, tmp_path, name, value):
        tensors = base_tensors()
        tensors[name].flat[-1] = value
        base = write(tmp_path / "base.safetensors", tensors)
        words = rf"base\.safetensors: {name} holds NaN or infinity; the file is damaged"
        self.check(base, files / "lora.safetensors", tmp_path / "out.safetensors", words)

    def test_a_noise_schedule_in_the_base_may_hold_infinity(self, files, tmp_path):
        table = np.array([0.5, np.inf], np.float32)
        base = write(tmp_path / "base.safetensors", base_tensors() | {"denoiser.log_sigmas": table})
        merge(base, files / "lora.safetensors", tmp_path / "out.safetensors")
        merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")
        assert merged["denoiser.log_sigmas"].tobytes() == table.tobytes()

    def test_strength_must_be_a_number(self, files, tmp_path):
        out = tmp_path / "out.safetensors"
        self.check(files / "base.safetensors", files / "lora.safetensors", out, "strength", ConfigError, float("nan"))
