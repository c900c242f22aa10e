"""LoRA files: names against the lists of other trainers' files, values through every conversion."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.folding import ALPHA_KEY, fold, unfold
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.sdxl.names import lora_family
from tests.golden_keys import golden

SDXL = lora_family()
COMPONENT = {"lora_unet": "unet", "lora_te1": "text_encoder", "lora_te2": "text_encoder_2"}
BF16 = ml_dtypes.bfloat16


def native_of(module, base):
    """(component, native module path) of a line in kohya's lists, by its weight's name alone."""
    path = base["base"].removeprefix("model.diffusion_model.").removesuffix(".weight")
    return COMPONENT["_".join(module.split("_")[:2])], path


def factors_for(shape, rank=2, alpha=1.0, dtype=np.float16, seed=0):
    out, into, *kernel = shape
    rng = np.random.default_rng(seed)
    down = rng.standard_normal((rank, into, *kernel)).astype(dtype)
    return LoraFactors(down, rng.standard_normal((out, rank, *[1] * len(kernel))).astype(dtype), alpha)


def state_of(name, **options):
    state = {}
    for module, base in golden(name).items():
        component, path = native_of(module, base)
        small = [min(size, 5) for size in base["shape"]]
        state.setdefault(component, {})[path] = factors_for(small, seed=len(path), **options)
    return state


def count(state):
    return {component: len(modules) for component, modules in state.items()}


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_state(a, b):
    assert count(a) == count(b)
    return all(
        same_bits(f.down, b[c][m].down) and same_bits(f.up, b[c][m].up) and f.alpha == b[c][m].alpha
        for c, modules in a.items()
        for m, f in modules.items()
    )


@pytest.mark.parametrize(("name", "unet"), [("lora_kohya_sdxl", 722), ("lora_kohya_sdxl_conv", 788)])
def test_kohya_keys_are_those_of_kohyas_own_network(name, unet):
    state = state_of(name)
    assert count(state) == {"unet": unet, "text_encoder": 72, "text_encoder_2": 192}
    expected = {f"{m}.{end}" for m in golden(name) for end in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert set(to_kohya(state, SDXL)) == expected


@pytest.mark.parametrize(("targets", "modules"), [("attention", 560), ("attention_ff", 700)])
def test_diffusers_keys_are_those_of_peft(targets, modules):
    """The same modules as PEFT's list, named through the native names of kohya's list."""
    ends = ("to_q", "to_k", "to_v", "to_out.0") + (("ff.net.0.proj", "ff.net.2") if targets == "attention_ff" else ())
    unet = {path: f for path, f in state_of("lora_kohya_sdxl")["unet"].items() if path.endswith(ends)}
    tensors, metadata = to_diffusers({"unet": unet}, SDXL)
    assert len(unet) == modules
    assert set(tensors) == set(golden("lora_peft_sdxl")[targets])
    assert ALPHA_KEY in metadata  # alpha 1 at rank 2


def test_text_encoders_in_diffusers_spelling():
    tensors, _ = to_diffusers(state_of("lora_kohya_sdxl"), SDXL)
    assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert "text_encoder_2.text_model.encoder.layers.31.mlp.fc2.lora_B.weight" in tensors


def test_kohya_shapes_and_scalar_alpha(tmp_path):
    state = {"unet": {"input_blocks.1.0.in_layers.2": factors_for((6, 5, 3, 3), rank=2, alpha=4.0)}}
    save_file(tmp_path / "x.safetensors", to_kohya(state, SDXL))
    stored = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    name = "lora_unet_input_blocks_1_0_in_layers_2"
    assert stored[f"{name}.lora_down.weight"].shape == (2, 5, 3, 3)
    assert stored[f"{name}.lora_up.weight"].shape == (6, 2, 1, 1)
    assert (stored[f"{name}.alpha"].shape, stored[f"{name}.alpha"].dtype) == ((), np.float16)
    assert stored[f"{name}.alpha"] == 4


def test_an_alpha_that_16_bits_cannot_hold_is_stored_in_32():
    state = {"unet": {"input_blocks.0.0": factors_for((6, 5), alpha=1.3, dtype=BF16)}}
    alpha = to_kohya(state, SDXL)["lora_unet_input_blocks_0_0.alpha"]
    assert (alpha.dtype, float(alpha)) == (np.float32, float(np.float32(1.3)))


def test_a_module_the_family_does_not_have_cannot_be_written():
    with pytest.raises(KeyError):
        to_kohya({"unet": {"double_blocks.0.img_attn.qkv": factors_for((6, 5))}}, SDXL)


class TestDialects:
    @pytest.fixture
    def state(self):
        return state_of("lora_kohya_sdxl_conv", alpha=2.0)  # alpha = rank: every dialect can say it

    def read(self, tmp_path, tensors, metadata=None):
        save_file(tmp_path / "x.safetensors", tensors, metadata)
        return from_file(tmp_path / "x.safetensors", SDXL)

    def renamed(self, state, rename):
        return {rename(key): value for key, value in to_diffusers(state, SDXL)[0].items()}

    def test_kohya(self, tmp_path, state):
        found = self.read(tmp_path, to_kohya(state, SDXL), {"ss_v2": "False"})
        assert same_state(found.state, state)
        assert (found.dialects, found.metadata) == (("kohya",), {"ss_v2": "False"})

    def test_peft(self, tmp_path, state):
        found = self.read(tmp_path, to_diffusers(state, SDXL)[0])
        assert same_state(found.state, state)
        assert found.dialects == ("peft",)

    def test_kohya_with_diffusers_paths(self, tmp_path, state):
        def rename(key):
            module, matrix = key.removesuffix(".weight").rsplit(".", 1)
            for there, here in (
                ("unet.", "lora_unet."),
                ("text_encoder.", "lora_te1."),
                ("text_encoder_2.", "lora_te2."),
            ):
                if module.startswith(there):
                    module = here + module.removeprefix(there)
            end = {"lora_A": "lora_down", "lora_B": "lora_up"}[matrix]
            return f"{module.replace('.', '_')}.{end}.weight"

        tensors = self.renamed(state, rename)
        assert "lora_unet_down_blocks_1_attentions_0_proj_in.lora_down.weight" in tensors
        found = self.read(tmp_path, tensors)
        assert same_state(found.state, state)
        assert "kohya with diffusers paths" in found.dialects

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (".lora.down.weight", ".lora.up.weight"),
            (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
            (".lora_A.default.weight", ".lora_B.default.weight"),
        ],
    )
    def test_older_endings(self, tmp_path, state, a, b):
        tensors = self.renamed(state, lambda k: k.replace(".lora_A.weight", a).replace(".lora_B.weight", b))
        assert same_state(self.read(tmp_path, tensors).state, state)

    def test_attention_processors(self, tmp_path, state):
        unet = {path: f for path, f in state["unet"].items() if ".attn" in path}

        def rename(key):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                for end, old in (("lora_A", "down"), ("lora_B", "up")):
                    new = f".processor.{part.removesuffix('.0')}_lora.{old}.weight"
                    key = key.replace(f".{part}.{end}.weight", new)
            return key

        tensors = self.renamed({"unet": unet}, rename)
        assert any(".attn2.processor.to_out_lora.up.weight" in key for key in tensors)
        assert same_state(self.read(tmp_path, tensors).state, {"unet": unet})

    def test_native_paths_with_dots(self, tmp_path, state):
        tensors = {}
        for path, factors in state["unet"].items():
            tensors[f"diffusion_model.{path}.lora_down.weight"] = factors.down
            tensors[f"diffusion_model.{path}.lora_up.weight"] = factors.up
        found = self.read(tmp_path, tensors)
        assert same_state(found.state, {"unet": state["unet"]})
        assert found.dialects == ("native",)

    def test_text_encoders_without_text_model(self, tmp_path, state):
        tensors = self.renamed(state, lambda key: key.replace(".text_model.", "."))
        assert same_state(self.read(tmp_path, tensors).state, state)

    def test_peft_configuration_gives_the_scale(self, tmp_path):
        state = state_of("lora_kohya_sdxl", alpha=2.0)
        config = {
            "unet.r": 2,
            "unet.lora_alpha": 8,
            "unet.alpha_pattern": {"mid_block.attentions.0.proj_in": 3},
            "text_encoder.lora_alpha": 8,
            "text_encoder.use_rslora": True,
        }
        metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
        found = self.read(tmp_path, to_diffusers(state, SDXL)[0], metadata).state
        assert found["unet"]["input_blocks.4.1.proj_in"].scale == 8 / 2
        assert found["unet"]["middle_block.1.proj_in"].scale == 3 / 2
        assert found["text_encoder"]["text_model.encoder.layers.0.mlp.fc1"].scale == pytest.approx(8 / 2**0.5)
        assert found["text_encoder_2"]["text_model.encoder.layers.0.mlp.fc1"].scale == 1

    @pytest.mark.parametrize("text", ["[", "5", "null", '{"unet.lora_alpha": "many"}', '{"unet.alpha_pattern": 3}'])
    def test_a_configuration_that_says_nothing_usable(self, tmp_path, state, text):
        found = self.read(tmp_path, to_diffusers(state, SDXL)[0], {"lora_adapter_metadata": text})
        assert same_state(found.state, state)


class TestRefusals:
    @pytest.fixture
    def tensors(self):
        return to_kohya(state_of("lora_kohya_sdxl"), SDXL)

    def check(self, tmp_path, tensors, match):
        save_file(tmp_path / "bad.safetensors", tensors)
        with pytest.raises(ModelFileError, match=rf"(?s)bad\.safetensors.*{match}"):
            from_file(tmp_path / "bad.safetensors", SDXL)

    def test_unknown_modules_are_listed_with_near_misses(self, tmp_path, tensors):
        odd = {
            "lora_unet_input_blocks_4_1_proj_inn.lora_down.weight": np.zeros((2, 2)),
            "lora_odd": np.zeros(2),
        }
        self.check(tmp_path, tensors | odd, "2 of its tensors.*nearest known: lora_unet_input_blocks_4_1_proj_in[)]")

    def test_embeddings_beside_a_lora_are_left_out_with_a_word(self, tmp_path, tensors, caplog):
        save_file(tmp_path / "x.safetensors", tensors | {"bundle_emb.word.string_to_param.*": np.zeros((2, 4))})
        assert same_state(from_file(tmp_path / "x.safetensors", SDXL).state, state_of("lora_kohya_sdxl"))
        assert "1 tensors of embeddings in the LoRA's file, such as bundle_emb.word" in caplog.text

    def test_half_a_pair(self, tmp_path, tensors):
        del tensors["lora_unet_middle_block_1_proj_in.lora_up.weight"]
        self.check(tmp_path, tensors, "middle_block.1.proj_in has no up matrix")

    def test_ranks_that_differ(self, tmp_path, tensors):
        tensors["lora_unet_middle_block_1_proj_in.lora_up.weight"] = np.zeros((5, 3), np.float16)
        self.check(tmp_path, tensors, "rank 2 in its down matrix and 3")

    def test_shapes_that_are_no_pair(self, tmp_path, tensors):
        tensors["lora_unet_middle_block_1_proj_in.lora_up.weight"] = np.zeros((5, 2, 1, 1), np.float16)
        self.check(tmp_path, tensors, "has shapes")

    @pytest.mark.parametrize("alpha", [np.zeros(2), np.array(np.nan)])
    def test_an_alpha_that_is_no_number(self, tmp_path, tensors, alpha):
        tensors["lora_unet_middle_block_1_proj_in.alpha"] = alpha
        self.check(tmp_path, tensors, "alpha that is not one finite number")

    def test_one_module_under_two_names(self, tmp_path, tensors):
        tensors["unet.mid_block.attentions.0.proj_in.lora_A.weight"] = np.zeros((2, 5), np.float16)
        self.check(tmp_path, tensors, "there twice")

    @pytest.mark.parametrize(
        ("end", "kind"),
        [
            ("hada_t1", "LoHa"),
            ("lokr_t2", "LoKr"),
            ("lora_mid.weight", "Tucker"),
            ("lora_B.bias", "LoRA with biases"),
            ("diff", "full differences"),
        ],
    )
    def test_relatives_of_lora(self, tmp_path, tensors, end, kind):
        tensors[f"lora_unet_middle_block_1_proj_in.{end}"] = np.zeros((2, 2), np.float16)
        self.check(tmp_path, tensors, f"is .*{kind}.*, a kind that is not read here")

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("hada_w1_a", "proj_in is of several kinds: it has .*hada_w1_a"),
            ("lokr_w1", "proj_in is of several kinds: it has .*lokr_w1"),
            ("dora_scale", r"proj_in has a magnitude of shape \(2, 2\)"),
            ("magnitude", r"proj_in has a magnitude of shape \(2, 2\)"),
        ],
    )
    def test_a_module_of_several_kinds(self, tmp_path, tensors, end, words):
        tensors[f"lora_unet_middle_block_1_proj_in.{end}"] = np.zeros((2, 2), np.float16)
        self.check(tmp_path, tensors, words)

    def test_nothing(self, tmp_path):
        self.check(tmp_path, {}, "holds no tensors")


class TestConversion:
    """kohya -> diffusers -> kohya."""

    def there_and_back(self, tmp_path, state):
        tensors, metadata = to_diffusers(state, SDXL)
        save_file(tmp_path / "d.safetensors", tensors, metadata)
        return from_file(tmp_path / "d.safetensors", SDXL).state

    @pytest.mark.parametrize(
        ("alpha", "dtype"),
        [
            (1.0, BF16),
            (4.0, np.float16),
            (0.25, BF16),
            (3.0, np.float16),
            (3.0, BF16),
            (1.3, BF16),
            (1 / 3, np.float16),
        ],
    )
    def test_16_bit_files_come_back_bit_for_bit(self, tmp_path, dtype, alpha):
        state = state_of("lora_kohya_sdxl", alpha=alpha, dtype=dtype)
        assert same_state(self.there_and_back(tmp_path, state), state)

    @pytest.mark.parametrize("alpha", [1.0, 2.0, 0.25])
    def test_fp32_with_a_power_of_two_comes_back_bit_for_bit(self, tmp_path, alpha):
        state = state_of("lora_kohya_sdxl", alpha=alpha, dtype=np.float32)
        assert same_state(self.there_and_back(tmp_path, state), state)

    def test_modules_of_different_alpha(self, tmp_path):
        state = state_of("lora_kohya_sdxl")
        for i, (path, f) in enumerate(state["unet"].items()):
            state["unet"][path] = LoraFactors(f.down, f.up, float(1 + i % 7))
        assert same_state(self.there_and_back(tmp_path, state), state)

    def test_16_bits_that_would_underflow_are_widened(self, tmp_path):
        up = np.array([[6e-8, 1.0]], np.float16)
        state = {"unet": {"input_blocks.0.0": LoraFactors(np.ones((2, 3), np.float16), up, 1 / 64)}}
        tensors, _ = to_diffusers(state, SDXL)
        assert tensors["unet.conv_in.lora_B.weight"].dtype == np.float32
        assert same_state(self.there_and_back(tmp_path, state), state)

    @settings(max_examples=200)
    @given(
        st.lists(st.floats(width=32, min_value=-1e4, max_value=1e4), min_size=4, max_size=4),
        st.floats(0.01, 200),
        st.integers(1, 128),
        st.sampled_from([np.float32, np.float16, BF16]),
    )
    def test_folding_any_scale(self, values, alpha, rank, dtype):
        up = np.resize(np.array(values, np.float32), (4, rank)).astype(dtype)
        down = np.ones((rank, 2), dtype)
        folded = fold(LoraFactors(down, up, alpha))
        true = up.astype(np.float64) * (alpha / rank)
        tiny = np.finfo(np.float32).tiny
        np.testing.assert_allclose(folded.astype(np.float64), true, rtol=2**-24, atol=tiny)
        back = unfold(down, folded, alpha)
        assert same_bits(fold(back), folded)  # converting again gives the same file
        if dtype is np.float32:
            error = np.abs(back.up.astype(np.float64) * back.scale - true)
            assert np.all(error <= np.maximum(np.abs(true) * 2**-22, tiny))
        elif back.alpha == alpha:
            assert same_bits(back.up, up)

    def test_the_effect_is_that_of_the_formula(self, tmp_path):
        factors = factors_for((5, 4, 3, 3), rank=3, alpha=2.0, dtype=np.float32)
        expected = (
            2.0 / 3 * np.einsum("or,rikl->oikl", factors.up[:, :, 0, 0].astype(float), factors.down.astype(float))
        )
        np.testing.assert_allclose(factors.delta(), expected, rtol=1e-5, atol=1e-6)
        tensors, _ = to_diffusers({"unet": {"input_blocks.1.0.in_layers.2": factors}}, SDXL)
        name = "unet.down_blocks.0.resnets.0.conv1"
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        np.testing.assert_allclose(np.einsum("or,rikl->oikl", up[:, :, 0, 0], down), expected, rtol=1e-5, atol=1e-6)

    def test_a_record_that_no_longer_fits_is_left_alone(self, tmp_path):
        state = state_of("lora_kohya_sdxl", alpha=1.0)
        for i, (path, f) in enumerate(state["unet"].items()):
            state["unet"][path] = LoraFactors(f.down, f.up, float(1 + i % 2))
        tensors, metadata = to_diffusers(state, SDXL)
        fewer = {k: v for k, v in tensors.items() if "mid_block" not in k}
        save_file(tmp_path / "d.safetensors", fewer, metadata)
        found = from_file(tmp_path / "d.safetensors", SDXL).state
        for path, factors in found["unet"].items():
            assert factors.scale == 1
            np.testing.assert_array_equal(factors.delta(), state["unet"][path].delta())

    @pytest.mark.parametrize("text", ["[", "[]", "{}", '{"unet":"x"}', '{"unet":-1}', '{"unet":[1]}', "NaN"])
    def test_a_record_that_lies(self, tmp_path, text):
        state = state_of("lora_kohya_sdxl", alpha=1.0)
        save_file(tmp_path / "d.safetensors", to_diffusers(state, SDXL)[0], {ALPHA_KEY: text})
        found = from_file(tmp_path / "d.safetensors", SDXL).state
        assert {f.scale for modules in found.values() for f in modules.values()} == {1.0}
